package lockertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/locker-go/locker"
)

// The two ttls with which a Locker that has one is tested.
const (
	wide   = 10 * time.Minute
	narrow = 30 * time.Millisecond
)

func TestRowMemory(t *testing.T) {
	for name, m := range map[string]*rowMemory{
		"wide":                    {ttl: wide},
		"narrow":                  {ttl: narrow},
		"any ttl":                 {},
		"wide, a constant token":  {ttl: wide, keeps: true},
		"20 ms, a constant token": {ttl: 20 * time.Millisecond, keeps: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m.testMemory = newTestMemory()
			Run(t, func(*testing.T) locker.Locker { return m }, m.options()...)
		})
	}
}

// rowMemory is a Memory as if a lock were a time in a row of somebody's table, and the token that time: there is one ttl, a renewal
// moves the token, and a release forgets it. A token names the grant of its owner that is as old or newer, so that a renewal whose
// answer was lost can be sent again.
type rowMemory struct {
	*testMemory
	ttl   time.Duration // 0: any
	keeps bool          // a renewal keeps the token, and a token names one grant
	last  int64         // what the clock said
}

func (m *rowMemory) options() (opts []Option) {
	if m.ttl != 0 {
		opts = append(opts, FixedTTL(m.ttl))
	}
	if !m.keeps {
		opts = append(opts, MovingToken())
	}
	return opts
}

func (m *rowMemory) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
	ttl, err := m.check(ttl)
	if err := errors.Join(locker.CheckName("resource", resource), locker.CheckName("owner", owner), err); err != nil {
		return locker.Record{}, err
	}
	if err := m.pass(ctx, resource); err != nil {
		return locker.Record{}, memoryError("acquire", resource, err)
	}
	defer m.lock()()
	if ctx.Err() != nil {
		return locker.Record{}, memoryError("acquire", resource, ctx.Err())
	}
	now := m.now()
	r := m.rows[resource]
	switch {
	case r == nil || r.owner == "": // a release has forgotten the token
		r = &memoryRow{}
		m.rows[resource] = r
	case r.expires > now && r.owner != owner:
		return locker.Record{}, &locker.HeldError{Holder: r.record(resource)}
	}
	m.grant(resource, r, owner, now, ttl)
	return r.record(resource), nil
}

func (m *rowMemory) Renew(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
	ttl, err := m.check(ttl)
	if err := errors.Join(locker.CheckGrant(rec), err); err != nil {
		return locker.Record{}, err
	}
	if err := m.pass(ctx, rec.Resource); err != nil {
		return locker.Record{}, memoryError("renew", rec.Resource, err)
	}
	defer m.lock()()
	now := m.now()
	r, err := m.find(ctx, rec, now)
	if err != nil {
		return locker.Record{}, memoryError("renew", rec.Resource, err)
	}
	m.renew(r, now, ttl)
	return r.record(rec.Resource), nil
}

func (m *rowMemory) Release(ctx context.Context, rec locker.Record) error {
	if err := locker.CheckGrant(rec); err != nil {
		return err
	}
	if err := m.pass(ctx, rec.Resource); err != nil {
		return memoryError("release", rec.Resource, err)
	}
	defer m.lock()()
	r, err := m.find(ctx, rec, m.now())
	if err != nil {
		return memoryError("release", rec.Resource, err)
	}
	m.free(rec.Resource, r)
	return nil
}

func (m *rowMemory) RenewBatch(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
	ttl, err := m.check(ttl)
	if err != nil {
		return nil, err
	}
	for _, rec := range recs {
		if err := locker.CheckGrant(rec); err != nil {
			return nil, err
		}
	}
	defer m.lock()()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("locker: renew %d locks: %w", len(recs), ctx.Err())
	}
	now := m.now()
	found := make(map[string]*memoryRow)
	for _, rec := range recs {
		if r, err := m.find(ctx, rec, now); err == nil {
			found[rec.Resource] = r
		}
	}
	var renewed []locker.Record
	for resource, r := range found {
		m.renew(r, now, ttl)
		renewed = append(renewed, r.record(resource))
	}
	return renewed, nil
}

func (m *rowMemory) Handover(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error) {
	ttl, err := m.check(ttl)
	if err := errors.Join(locker.CheckGrant(rec), locker.CheckName("owner", owner), err); err != nil {
		return locker.Record{}, err
	}
	defer m.lock()()
	now := m.now()
	r, err := m.find(ctx, rec, now)
	if err != nil {
		return locker.Record{}, memoryError("hand over", rec.Resource, err)
	}
	m.grant(rec.Resource, r, owner, now, ttl)
	return r.record(rec.Resource), nil
}

func (m *rowMemory) check(ttl time.Duration) (time.Duration, error) {
	if _, err := locker.CheckTTL(ttl); err == nil && m.ttl != 0 && ttl != m.ttl {
		return 0, &locker.InvalidError{Field: "ttl", Reason: fmt.Sprintf("is %v; here it is always %v", ttl, m.ttl)}
	}
	return locker.CheckTTL(ttl)
}

// The rest is called under m.lock.

// now is later each time, as the clock of a database is for those who come one after another.
func (m *rowMemory) now() int64 {
	for {
		if now := time.Now().UnixMicro(); now > m.last {
			m.last = now
			return now
		}
	}
}

func (m *rowMemory) find(ctx context.Context, rec locker.Record, now int64) (*memoryRow, error) {
	r, err := m.live(ctx, rec.Resource, now)
	if err == nil && (r.owner != rec.Owner || rec.Token > r.token || m.keeps && rec.Token != 0 && rec.Token < r.token) {
		err = locker.ErrNotOwner
	}
	return r, err
}

func (m *rowMemory) renew(r *memoryRow, now int64, ttl time.Duration) {
	if !m.keeps {
		r.token = max(r.token+1, now)
	}
	r.expires = now + ttl.Microseconds()
}

// hooked is m with verbs that can be replaced.
func (m *rowMemory) hooked() hooked {
	return hooked{testMemory: m.testMemory, acquire: m.Acquire, renew: m.Renew, release: m.Release, batch: m.RenewBatch, handover: m.Handover}
}

// brokenRows are brokenLockers of the other kind: what is easily made wrong where a lock is a time.
var brokenRows = []struct {
	name   string
	ttl    time.Duration
	locker func(m *rowMemory) locker.Locker
	fails  []string
}{
	{"a renewal keeps the token", wide, func(m *rowMemory) locker.Locker {
		m.keeps = true
		return m
	}, []string{"renew-keeps-token", "batch", "batch-duplicates", "batch-large"}},

	{"a renewal moves the token back", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			if _, err := m.Renew(ctx, rec, ttl); err != nil {
				return locker.Record{}, err
			}
			m.change(rec.Resource, func(r *memoryRow) { r.token = rec.Token - 1 })
			return m.Get(ctx, rec.Resource)
		}
		return h
	}, []string{"renew-keeps-token", "renew-same-instant"}},

	{"a renewal returns the token before", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			renewed, err := m.Renew(ctx, rec, ttl)
			if err == nil {
				renewed.Token = rec.Token
			}
			return renewed, err
		}
		return h
	}, []string{"renew-keeps-token", "renew-full-ttl", "record-times"}},

	{"a renewal leaves AcquiredAt behind", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			renewed, err := m.Renew(ctx, rec, ttl)
			renewed.AcquiredAt = rec.AcquiredAt
			return renewed, err
		}
		return h
	}, []string{"renew-keeps-token", "record-times"}},

	{"a renewal that changes nothing", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = m.pretend
		return h
	}, []string{"renew-keeps-token", "renew-full-ttl", "two-lockers"}},

	{"a renewal that changes nothing, where leases run out", narrow, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = m.pretend
		return h
	}, []string{"renew-or-claim", "no-overlap"}},

	{"a renewal whose answer was lost is not renewed again", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		named := func(ctx context.Context, rec locker.Record) bool {
			holder, err := m.Get(ctx, rec.Resource)
			return err != nil || holder.Token == rec.Token
		}
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			if !named(ctx, rec) {
				return locker.Record{}, memoryError("renew", rec.Resource, locker.ErrNotOwner)
			}
			return m.Renew(ctx, rec, ttl)
		}
		h.batch = func(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
			recs = slices.DeleteFunc(slices.Clone(recs), func(rec locker.Record) bool { return !named(ctx, rec) })
			return m.RenewBatch(ctx, recs, ttl)
		}
		return h
	}, []string{"renew-same-instant", "batch-duplicates"}},

	{"a renewal ignores the owner", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			if holder, err := m.Get(ctx, rec.Resource); err == nil {
				rec.Owner = holder.Owner
			}
			return m.Renew(ctx, rec, ttl)
		}
		return h
	}, []string{"renew-not-owner", "errors", "names-owner"}},

	{"a token that is too high is taken", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			rec.Token = min(rec.Token, 0)
			return m.Renew(ctx, rec, ttl)
		}
		h.release = func(ctx context.Context, rec locker.Record) error {
			rec.Token = min(rec.Token, 0)
			return m.Release(ctx, rec)
		}
		return h
	}, []string{"renew-not-owner", "release-not-owner"}},

	{"an expired lock is renewed", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			m.revive(rec)
			return m.Renew(ctx, rec, ttl)
		}
		return h
	}, []string{"renew-not-held", "record-rebuilt"}},

	{"a batch renews what expired", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.batch = func(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
			for _, rec := range recs {
				m.revive(rec)
			}
			return m.RenewBatch(ctx, recs, ttl)
		}
		return h
	}, []string{"batch-left-out"}},

	{"a batch answers with what it was sent", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.batch = func(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
			if _, err := m.RenewBatch(ctx, recs, ttl); err != nil {
				return nil, err
			}
			return recs, nil
		}
		return h
	}, []string{"batch", "batch-left-out", "batch-duplicates", "batch-large"}},

	{"a claim of what is held", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.acquire = m.steal
		return h
	}, []string{"acquire-held", "acquire-expired", "names-owner", "one-winner", "one-winner-expired", "two-lockers"}},

	{"a claim of what is held, where leases run out", narrow, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.acquire = m.steal
		return h
	}, []string{"ttl-lasts", "renew-or-claim", "no-overlap"}},

	{"release frees what is another owner's", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.release = func(ctx context.Context, rec locker.Record) error {
			if holder, err := m.Get(ctx, rec.Resource); err == nil {
				rec.Owner = holder.Owner
			}
			return m.Release(ctx, rec)
		}
		return h
	}, []string{"acquire-held", "acquire-expired", "release-not-owner", "names-owner", "handover"}},

	{"a hand-over keeps the token", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.handover = func(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error) {
			before, _ := m.Get(ctx, rec.Resource)
			if _, err := m.Handover(ctx, rec, owner, ttl); err != nil {
				return locker.Record{}, err
			}
			m.change(rec.Resource, func(r *memoryRow) { r.token = before.Token })
			return m.Get(ctx, rec.Resource)
		}
		return h
	}, []string{"handover", "handover-no-gap", "tokens-rise"}},

	{"another ttl is taken", wide, func(m *rowMemory) locker.Locker {
		m.ttl = 0
		return m
	}, []string{"ttl-rejected"}},

	{"the ttl is not what it is said to be", wide, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.acquire = func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if err == nil {
				m.change(resource, func(r *memoryRow) { r.expires += time.Second.Microseconds() })
				rec.ExpiresAt = rec.ExpiresAt.Add(time.Second)
			}
			return rec, err
		}
		return h
	}, []string{"ttl-accepted", "record-remaining"}},

	{"leases end early", narrow, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.acquire = func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if err == nil {
				m.change(resource, func(r *memoryRow) { r.expires -= ttl.Microseconds() / 2 })
			}
			return rec, err
		}
		return h
	}, []string{"ttl-lasts", "no-overlap"}},

	{"select, then renew", narrow, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			holder, err := m.Get(ctx, rec.Resource)
			switch {
			case err != nil:
				return locker.Record{}, err
			case holder.Owner != rec.Owner:
				return locker.Record{}, memoryError("renew", rec.Resource, locker.ErrNotOwner)
			}
			time.Sleep(5 * time.Millisecond)
			m.change(rec.Resource, func(r *memoryRow) { r.owner = rec.Owner })
			m.revive(rec)
			return m.Renew(ctx, rec, ttl)
		}
		return h
	}, []string{"renew-or-claim"}},

	{"a lease is counted from before the wait", narrow, func(m *rowMemory) locker.Locker {
		late := func(ctx context.Context, resource string, send func() (locker.Record, error)) (locker.Record, error) {
			begin := time.Now()
			if err := m.pass(ctx, resource); err != nil {
				return locker.Record{}, err
			}
			waited := time.Since(begin).Truncate(10 * time.Millisecond)
			rec, err := send()
			if err == nil {
				m.change(resource, func(r *memoryRow) { r.expires -= waited.Microseconds() })
			}
			return rec, err
		}
		h := m.hooked()
		h.acquire = func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			return late(ctx, resource, func() (locker.Record, error) { return m.Acquire(ctx, resource, owner, ttl) })
		}
		h.renew = func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			return late(ctx, rec.Resource, func() (locker.Record, error) {
				m.revive(rec)
				return m.Renew(ctx, rec, ttl)
			})
		}
		return h
	}, []string{"blocked-renew", "blocked-acquire"}},

	{"a waiter sees no end", narrow, func(m *rowMemory) locker.Locker {
		h := m.hooked()
		h.wait = func(ctx context.Context, _ locker.Record) error {
			<-ctx.Done()
			return ctx.Err()
		}
		return h
	}, []string{"wait-free"}},

	{"what is said to be over is not", wide, func(m *rowMemory) locker.Locker {
		return neverExpires{m}
	}, []string{"acquire-expired", "renew-not-held", "tokens-rise"}},
}

// TestBrokenRows shows that the suite can fail where a ttl is fixed and tokens move.
func TestBrokenRows(t *testing.T) {
	for _, b := range brokenRows {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			l := b.locker(&rowMemory{testMemory: newTestMemory(), ttl: b.ttl})
			s := &suite{lockers: [2]locker.Locker{l, l}, short: true, patience: 200 * time.Millisecond, fixed: b.ttl, moving: true}
			s.mustFind(t, b.fails)
		})
	}
}

// pretend is a Renew that returns what it should and does not write it.
func (m *rowMemory) pretend(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
	if _, err := m.check(ttl); err != nil {
		return locker.Record{}, err
	}
	defer m.lock()()
	now := m.now()
	r, err := m.find(ctx, rec, now)
	if err != nil {
		return locker.Record{}, memoryError("renew", rec.Resource, err)
	}
	renewed := *r
	m.renew(&renewed, now, ttl)
	return renewed.record(rec.Resource), nil
}

// steal is an Acquire that does not mind who is there.
func (m *rowMemory) steal(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
	if _, err := m.ForceRelease(ctx, resource); err != nil && !errors.Is(err, locker.ErrNotHeld) {
		return locker.Record{}, err
	}
	return m.Acquire(ctx, resource, owner, ttl)
}

// revive gives an expired grant of rec's owner its life back.
func (m *rowMemory) revive(rec locker.Record) {
	m.change(rec.Resource, func(r *memoryRow) {
		if now := time.Now().UnixMicro(); r.owner == rec.Owner && r.expires <= now {
			r.token, r.expires = now, now+time.Minute.Microseconds()
		}
	})
}

// neverExpires is a wrapper whose Expire forgets to.
type neverExpires struct{ *rowMemory }

func (neverExpires) Expire(context.Context, string) error { return nil }
