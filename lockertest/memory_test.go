package lockertest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/locker-go/locker"
)

func TestMemory(t *testing.T) {
	store := newTestMemory()
	Run(t, func(*testing.T) locker.Locker { return store })
}

// The optional interfaces are optional: the four verbs will do.
func TestMemoryWithFourVerbs(t *testing.T) {
	store := NewMemory()
	Run(t, func(*testing.T) locker.Locker { return struct{ locker.Locker }{store} })
}

// testMemory is a Memory with the interfaces that a test may add. While a resource is blocked, changes of it wait.
//
// Expire is what it is where a lock is the time of its grant: that time, and so the token, is moved back.
type testMemory struct {
	*Memory
	gate  sync.Mutex // of gates
	gates map[string]chan struct{}
}

var (
	_ Blocker    = (*testMemory)(nil)
	_ Expirer    = (*testMemory)(nil)
	_ RowDeleter = (*testMemory)(nil)
)

func newTestMemory() *testMemory {
	return &testMemory{Memory: NewMemory(), gates: make(map[string]chan struct{})}
}

func (m *testMemory) DeleteRow(_ context.Context, resource string) error {
	defer m.lock()()
	delete(m.rows, resource)
	return nil
}

func (m *testMemory) Expire(_ context.Context, resource string) error {
	now := time.Now().UnixMicro()
	m.change(resource, func(r *memoryRow) { r.token, r.expires = r.token-(r.expires-now), now })
	return nil
}

func (m *testMemory) Block(_ context.Context, resource string) (unblock func(), err error) {
	m.gate.Lock()
	defer m.gate.Unlock()
	gate := make(chan struct{})
	m.gates[resource] = gate
	return func() { close(gate) }, nil
}

// pass waits until resource is not blocked.
func (m *testMemory) pass(ctx context.Context, resource string) error {
	m.gate.Lock()
	gate := m.gates[resource]
	m.gate.Unlock()
	if gate == nil {
		return nil
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m *testMemory) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
	if err := m.pass(ctx, resource); err != nil {
		return locker.Record{}, err
	}
	return m.Memory.Acquire(ctx, resource, owner, ttl)
}

func (m *testMemory) Renew(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
	if err := m.pass(ctx, rec.Resource); err != nil {
		return locker.Record{}, err
	}
	return m.Memory.Renew(ctx, rec, ttl)
}

func (m *testMemory) Release(ctx context.Context, rec locker.Record) error {
	if err := m.pass(ctx, rec.Resource); err != nil {
		return err
	}
	return m.Memory.Release(ctx, rec)
}

// In a bubble of testing/synctest a lease of a year ends without a wait, and to the microsecond.
func TestMemoryFakeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 365 * 24 * time.Hour
		ctx := t.Context()
		m := NewMemory()
		first, err := m.Acquire(ctx, "report", "a", ttl)
		if err != nil {
			t.Fatal(err)
		}
		if first.Remaining != ttl || !first.ExpiresAt.Equal(time.Now().Add(ttl)) {
			t.Errorf("granted %+v at %v, want the ttl of %v", first, time.Now(), ttl)
		}

		time.Sleep(ttl - time.Microsecond)
		if got, err := m.Get(ctx, "report"); err != nil || got.Remaining != time.Microsecond {
			t.Errorf("just before the end: %+v, %v", got, err)
		}
		var held *locker.HeldError
		if _, err := m.Acquire(ctx, "report", "b", ttl); !errors.As(err, &held) || held.Holder.Remaining != time.Microsecond {
			t.Errorf("acquire just before the end: %v", err)
		}

		time.Sleep(time.Microsecond)
		if _, err := m.Renew(ctx, first, ttl); !errors.Is(err, locker.ErrNotHeld) {
			t.Errorf("renewal at the end: %v, want ErrNotHeld", err)
		}
		second, err := m.Acquire(ctx, "report", "b", ttl)
		if err != nil || second.Token <= first.Token {
			t.Errorf("acquire at the end: %+v, %v", second, err)
		}

		// Purge minds what is held and what is not idle.
		for _, step := range []struct {
			sleep, idle time.Duration
			want        int64
		}{
			{time.Hour, 0, 0},
			{ttl, 2 * ttl, 0},
			{0, ttl, 1},
		} {
			time.Sleep(step.sleep)
			if n, err := m.Purge(ctx, step.idle); err != nil || n != step.want {
				t.Errorf("Purge(%v) = %d, %v, want %d", step.idle, n, err, step.want)
			}
		}
	})
}

// Grants in the same instant still have different tokens, and a purge in that instant does not forget the last one.
func TestMemoryTokensWhileTimeStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		m := NewMemory()
		var last int64
		for i := range 100 {
			rec, err := m.Acquire(ctx, "report", "a", time.Second)
			if err != nil || rec.Token <= last {
				t.Fatalf("grant %d: token %d after %d, %v", i, rec.Token, last, err)
			}
			last = rec.Token
			if err := m.Release(ctx, rec); err != nil {
				t.Fatal(err)
			}
			if n, err := m.Purge(ctx, 0); n != 0 || err != nil {
				t.Fatalf("Purge took %d with tokens that are not past, %v", n, err)
			}
		}
	})
}

func TestMemoryWaitFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		m := NewMemory()
		rec, err := m.Acquire(ctx, "report", "a", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		ends := make(chan time.Duration, 2)
		for range 2 {
			go func() {
				if err := m.WaitFree(ctx, rec); err != nil {
					t.Error(err)
				}
				ends <- time.Since(begin)
			}()
		}
		time.Sleep(30 * time.Second)
		if _, err := m.Renew(ctx, rec, time.Minute); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if end := <-ends; end != 90*time.Second {
				t.Errorf("woken after %v, want 90s: renewed for a minute after half of one", end)
			}
		}
	})
}
