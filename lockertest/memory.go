package lockertest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/locker-go/locker"
)

// Memory is a Locker in the memory of one process, for tests of code that takes a locker.Locker. It keeps every promise of the
// interface, passes Run, and has all the optional interfaces.
//
// Its clock is time.Now and it starts no goroutine, so in a bubble of testing/synctest leases end in fake time: create it inside
// the bubble, and a Session too, which must be closed before the bubble's end (defer session.Close(context.Background())). Nothing but the rows in the map is kept, released ones included, for their tokens; see Purge.
//
// A Memory is safe for concurrent use. All handles on one store are one *Memory.
type Memory struct {
	mu    sync.Mutex
	rows  map[string]*memoryRow
	freed map[string]chan struct{} // by resource; closed when a grant ends, for those in WaitFree
}

var (
	_ locker.Locker       = (*Memory)(nil)
	_ locker.BatchRenewer = (*Memory)(nil)
	_ locker.Handoverer   = (*Memory)(nil)
	_ locker.Waiter       = (*Memory)(nil)
	_ locker.Admin        = (*Memory)(nil)
	_ locker.Pinger       = (*Memory)(nil)
	_ Purger              = (*Memory)(nil)
)

// memoryRow has its times in microseconds since 1970, as a table has.
type memoryRow struct {
	owner   string // "" after a release
	token   int64  // of the last grant
	expires int64  // 0 after a release
}

// NewMemory returns an empty store.
func NewMemory() *Memory {
	return &Memory{rows: make(map[string]*memoryRow), freed: make(map[string]chan struct{})}
}

// Acquire claims resource for owner, see locker.Locker.
func (m *Memory) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
	if err := locker.CheckName("resource", resource); err != nil {
		return locker.Record{}, err
	}
	if err := locker.CheckName("owner", owner); err != nil {
		return locker.Record{}, err
	}
	ttl, err := locker.CheckTTL(ttl)
	if err != nil {
		return locker.Record{}, err
	}
	defer m.lock()()
	if ctx.Err() != nil {
		return locker.Record{}, memoryError("acquire", resource, ctx.Err())
	}
	now := time.Now().UnixMicro()
	r := m.rows[resource]
	switch {
	case r == nil:
		r = &memoryRow{}
		m.rows[resource] = r
	case r.expires > now && r.owner != owner:
		return locker.Record{}, &locker.HeldError{Holder: r.record(resource)}
	}
	m.grant(resource, r, owner, now, ttl)
	return r.record(resource), nil
}

// Renew prolongs the grant that rec names, see locker.Locker. Token 0 renews any grant of the owner.
func (m *Memory) Renew(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
	if err := locker.CheckGrant(rec); err != nil {
		return locker.Record{}, err
	}
	ttl, err := locker.CheckTTL(ttl)
	if err != nil {
		return locker.Record{}, err
	}
	defer m.lock()()
	now := time.Now().UnixMicro()
	r, err := m.find(ctx, rec, now)
	if err != nil {
		return locker.Record{}, memoryError("renew", rec.Resource, err)
	}
	r.expires = now + ttl.Microseconds()
	return r.record(rec.Resource), nil
}

// Release frees the grant that rec names, see locker.Locker. Token 0 frees any grant of the owner.
func (m *Memory) Release(ctx context.Context, rec locker.Record) error {
	if err := locker.CheckGrant(rec); err != nil {
		return err
	}
	defer m.lock()()
	r, err := m.find(ctx, rec, time.Now().UnixMicro())
	if err != nil {
		return memoryError("release", rec.Resource, err)
	}
	m.free(rec.Resource, r)
	return nil
}

// Get reads a live lock, see locker.Locker.
func (m *Memory) Get(ctx context.Context, resource string) (locker.Record, error) {
	if err := locker.CheckName("resource", resource); err != nil {
		return locker.Record{}, err
	}
	defer m.lock()()
	r, err := m.live(ctx, resource, time.Now().UnixMicro())
	if err != nil {
		return locker.Record{}, memoryError("get", resource, err)
	}
	return r.record(resource), nil
}

// RenewBatch renews what it can of recs, see locker.BatchRenewer. Every record must have its token.
func (m *Memory) RenewBatch(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
	ttl, err := locker.CheckTTL(ttl)
	if err != nil {
		return nil, err
	}
	for _, rec := range recs {
		if err := locker.CheckGrant(rec); err != nil {
			return nil, err
		}
		if rec.Token == 0 {
			return nil, &locker.InvalidError{Field: "token", Reason: fmt.Sprintf("is 0 for %q; a batch renews exact grants", rec.Resource)}
		}
	}
	defer m.lock()()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("locker: renew %d locks: %w", len(recs), ctx.Err())
	}
	now := time.Now().UnixMicro()
	seen := make(map[string]bool, len(recs))
	var renewed []locker.Record
	for _, rec := range recs {
		r, err := m.find(ctx, rec, now)
		if err != nil || seen[rec.Resource] {
			continue
		}
		seen[rec.Resource] = true
		r.expires = now + ttl.Microseconds()
		renewed = append(renewed, r.record(rec.Resource))
	}
	return renewed, nil
}

// Handover gives the grant that rec names to owner, see locker.Handoverer.
func (m *Memory) Handover(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error) {
	if err := locker.CheckGrant(rec); err != nil {
		return locker.Record{}, err
	}
	if err := locker.CheckName("owner", owner); err != nil {
		return locker.Record{}, err
	}
	ttl, err := locker.CheckTTL(ttl)
	if err != nil {
		return locker.Record{}, err
	}
	defer m.lock()()
	now := time.Now().UnixMicro()
	r, err := m.find(ctx, rec, now)
	if err != nil {
		return locker.Record{}, memoryError("hand over", rec.Resource, err)
	}
	m.grant(rec.Resource, r, owner, now, ttl)
	return r.record(rec.Resource), nil
}

// WaitFree returns when the grant held is over, see locker.Waiter.
func (m *Memory) WaitFree(ctx context.Context, held locker.Record) error {
	for {
		left, freed := m.watch(ctx, held)
		if ctx.Err() != nil {
			return memoryError("wait for", held.Resource, ctx.Err())
		}
		if left <= 0 {
			return nil
		}
		timer := time.NewTimer(left)
		select {
		case <-freed:
		case <-timer.C: // unless it was renewed in the meantime
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// watch returns how long the grant held has left, and a channel that is closed when it ends early.
func (m *Memory) watch(ctx context.Context, held locker.Record) (left time.Duration, freed <-chan struct{}) {
	defer m.lock()()
	r, err := m.live(ctx, held.Resource, time.Now().UnixMicro())
	if err != nil || r.owner != held.Owner || held.Token != 0 && r.token != held.Token {
		return 0, nil
	}
	if m.freed[held.Resource] == nil {
		m.freed[held.Resource] = make(chan struct{})
	}
	return time.Until(time.UnixMicro(r.expires)), m.freed[held.Resource]
}

// List returns live locks by name, see locker.Admin.
func (m *Memory) List(ctx context.Context, after string, limit int) ([]locker.Record, error) {
	if limit < 1 {
		return nil, &locker.InvalidError{Field: "limit", Reason: fmt.Sprintf("is %d; it must be at least 1", limit)}
	}
	if after != "" {
		if err := locker.CheckName("after", after); err != nil {
			return nil, err
		}
	}
	defer m.lock()()
	if ctx.Err() != nil {
		return nil, memoryError("list after", after, ctx.Err())
	}
	now := time.Now().UnixMicro()
	var recs []locker.Record
	for _, name := range slices.Sorted(maps.Keys(m.rows)) {
		if len(recs) == limit {
			break
		}
		if r := m.rows[name]; name > after && r.expires > now {
			recs = append(recs, r.record(name))
		}
	}
	return recs, nil
}

// ForceRelease frees resource and returns whom it evicted, see locker.Admin.
func (m *Memory) ForceRelease(ctx context.Context, resource string) (locker.Record, error) {
	if err := locker.CheckName("resource", resource); err != nil {
		return locker.Record{}, err
	}
	defer m.lock()()
	r, err := m.live(ctx, resource, time.Now().UnixMicro())
	if err != nil {
		return locker.Record{}, memoryError("force release", resource, err)
	}
	evicted := r.record(resource)
	m.free(resource, r)
	return evicted, nil
}

// Purge forgets what has been free or expired, and was acquired for the last time more than idle ago, and returns how many. Like
// that of a Table it keeps what has a token in the future, so that tokens go on rising.
func (m *Memory) Purge(ctx context.Context, idle time.Duration) (int64, error) {
	if idle < 0 || idle > locker.MaxTTL {
		return 0, &locker.InvalidError{Field: "idle", Reason: fmt.Sprintf("is %v; it must be from 0 to ten years", idle)}
	}
	defer m.lock()()
	if ctx.Err() != nil {
		return 0, fmt.Errorf("locker: purge: %w", ctx.Err())
	}
	now := time.Now().UnixMicro()
	before := len(m.rows)
	maps.DeleteFunc(m.rows, func(_ string, r *memoryRow) bool {
		return r.expires <= now && r.token < now-idle.Microseconds()
	})
	return int64(before - len(m.rows)), nil
}

// Ping returns nil unless ctx has ended.
func (m *Memory) Ping(ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf("locker: ping: %w", ctx.Err())
	}
	return nil
}

// The rest is called under m.lock: defer m.lock()().

func (m *Memory) lock() (unlock func()) {
	m.mu.Lock()
	return m.mu.Unlock
}

// live returns the row of resource if it is held.
func (m *Memory) live(ctx context.Context, resource string, now int64) (*memoryRow, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	r := m.rows[resource]
	if r == nil || r.expires <= now {
		return nil, locker.ErrNotHeld
	}
	return r, nil
}

// find returns the row of the very grant that rec names; token 0 is any grant of the owner.
func (m *Memory) find(ctx context.Context, rec locker.Record, now int64) (*memoryRow, error) {
	r, err := m.live(ctx, rec.Resource, now)
	if err == nil && (r.owner != rec.Owner || rec.Token != 0 && r.token != rec.Token) {
		err = locker.ErrNotOwner
	}
	return r, err
}

func (m *Memory) grant(resource string, r *memoryRow, owner string, now int64, ttl time.Duration) {
	m.wake(resource)
	r.owner, r.token, r.expires = owner, max(r.token+1, now), now+ttl.Microseconds()
}

func (m *Memory) free(resource string, r *memoryRow) {
	m.wake(resource)
	r.owner, r.expires = "", 0
}

func (m *Memory) wake(resource string) {
	if freed := m.freed[resource]; freed != nil {
		close(freed)
		delete(m.freed, resource)
	}
}

func (r *memoryRow) record(resource string) locker.Record {
	expires := time.UnixMicro(r.expires).UTC()
	return locker.Record{
		Resource:   resource,
		Owner:      r.owner,
		Token:      r.token,
		AcquiredAt: time.UnixMicro(r.token).UTC(),
		ExpiresAt:  expires,
		Remaining:  max(0, time.Until(expires)),
	}
}

func memoryError(verb, resource string, err error) error {
	return fmt.Errorf("locker: %s %q: %w", verb, resource, err)
}
