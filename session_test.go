package locker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/locker-go/locker"
	"github.com/locker-go/locker/lockertest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A call is one request that a session sent.
type call struct {
	verb  string
	owner string
	recs  []locker.Record
	at    time.Time
}

// script is a Locker in memory whose requests are recorded and can be made to fail: before it is executed, or its answer afterwards.
type script struct {
	*lockertest.Memory

	mu     sync.Mutex
	calls  []call
	before func(context.Context, call) error
	after  func(context.Context, call) error
}

func newScript() *script { return &script{Memory: lockertest.NewMemory()} }

func (s *script) on(before, after func(context.Context, call) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before, s.after = before, after
}

func (s *script) take() []call {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.calls
	s.calls = nil
	return c
}

func (s *script) count(verb string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if c.verb == verb {
			n++
		}
	}
	return n
}

func (s *script) send(ctx context.Context, c call, do func() error) error {
	c.at = time.Now()
	s.mu.Lock()
	s.calls = append(s.calls, c)
	before, after := s.before, s.after
	s.mu.Unlock()
	if before != nil {
		if err := before(ctx, c); err != nil {
			return err
		}
	}
	err := do()
	if after != nil {
		if lost := after(ctx, c); lost != nil {
			return lost
		}
	}
	return err
}

func (s *script) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (rec locker.Record, err error) {
	err = s.send(ctx, call{verb: "acquire", owner: owner, recs: []locker.Record{{Resource: resource}}}, func() (err error) {
		rec, err = s.Memory.Acquire(ctx, resource, owner, ttl)
		return err
	})
	return rec, err
}

func (s *script) Renew(ctx context.Context, r locker.Record, ttl time.Duration) (rec locker.Record, err error) {
	err = s.send(ctx, call{verb: "renew", owner: r.Owner, recs: []locker.Record{r}}, func() (err error) {
		rec, err = s.Memory.Renew(ctx, r, ttl)
		return err
	})
	return rec, err
}

func (s *script) RenewBatch(ctx context.Context, recs []locker.Record, ttl time.Duration) (renewed []locker.Record, err error) {
	err = s.send(ctx, call{verb: "batch", recs: recs}, func() (err error) {
		renewed, err = s.Memory.RenewBatch(ctx, recs, ttl)
		return err
	})
	return renewed, err
}

func (s *script) Handover(ctx context.Context, r locker.Record, owner string, ttl time.Duration) (rec locker.Record, err error) {
	err = s.send(ctx, call{verb: "handover", owner: owner, recs: []locker.Record{r}}, func() (err error) {
		rec, err = s.Memory.Handover(ctx, r, owner, ttl)
		return err
	})
	return rec, err
}

func (s *script) Release(ctx context.Context, r locker.Record) error {
	return s.send(ctx, call{verb: "release", owner: r.Owner, recs: []locker.Record{r}}, func() error { return s.Memory.Release(ctx, r) })
}

func (s *script) Get(ctx context.Context, resource string) (rec locker.Record, err error) {
	err = s.send(ctx, call{verb: "get", recs: []locker.Record{{Resource: resource}}}, func() (err error) {
		rec, err = s.Memory.Get(ctx, resource)
		return err
	})
	return rec, err
}

// plain hides the optional interfaces of a Locker.
type plain struct{ locker.Locker }

var errNetwork = errors.New("connection reset by peer")

func fail(verbs ...string) func(context.Context, call) error {
	return func(_ context.Context, c call) error {
		for _, v := range verbs {
			if c.verb == v {
				return errNetwork
			}
		}
		return nil
	}
}

// hang lets requests of these verbs wait for their ctx, as a black hole does.
func hang(verbs ...string) func(context.Context, call) error {
	return func(ctx context.Context, c call) error {
		for _, v := range verbs {
			if c.verb == v {
				<-ctx.Done()
				return ctx.Err()
			}
		}
		return nil
	}
}

// session returns a session on l that is closed when the test ends, in the bubble that it runs in.
func session(t *testing.T, l locker.Locker, opts ...locker.SessionOption) *locker.Session {
	t.Helper()
	s, err := locker.NewSession(l, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close(context.Background())) })
	return s
}

func lock(t *testing.T, s *locker.Session, resource string, opts ...locker.LockOption) *locker.Lease {
	t.Helper()
	l, err := s.TryLock(t.Context(), resource, opts...)
	require.NoError(t, err)
	return l
}

func ended(ctx context.Context) bool { return ctx.Err() != nil }

func TestALeaseOutlivesItsTTLWhileTheSessionLives(t *testing.T) {
	for name, l := range map[string]locker.Locker{"batch": lockertest.NewMemory(), "one by one": plain{lockertest.NewMemory()}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, other := session(t, l, locker.WithTTL(3*time.Second)), session(t, l)
				a, b := lock(t, s, "a"), lock(t, s, "b")
				token := a.Token()
				ctx, cancel := a.Context(t.Context())
				defer cancel()
				for range 100 {
					time.Sleep(300 * time.Millisecond)
					_, err := other.TryLock(t.Context(), "a")
					require.ErrorIs(t, err, locker.ErrHeld)
				}
				assert.False(t, ended(ctx))
				assert.NoError(t, a.Err())
				assert.NoError(t, b.Err())
				assert.Equal(t, token, a.Token(), "renewals keep the token")
				require.NoError(t, a.Release(t.Context()))
				assert.True(t, ended(ctx), "work after a release is not protected")
				assert.ErrorIs(t, a.Err(), locker.ErrNotHeld)
				_, err := other.TryLock(t.Context(), "a")
				assert.NoError(t, err)
			})
		})
	}
}

// The field has seen locks that silently stopped being renewed when the context of the acquire ended.
func TestTheContextOfTheAcquireDoesNotEndTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := session(t, lockertest.NewMemory(), locker.WithTTL(2*time.Second))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		l, err := s.Lock(ctx, "r")
		require.NoError(t, err)
		cancel()
		time.Sleep(time.Minute)
		assert.NoError(t, l.Err())
	})
}

func TestTrustEndsBeforeTheLeaseWhateverTheDatabaseDoes(t *testing.T) {
	const ttl = 10 * time.Second
	never := make(chan struct{})
	for name, before := range map[string]func(context.Context, call) error{
		"errors": fail("renew", "batch"),
		"hangs":  hang("renew", "batch"),
		"ignores": func(_ context.Context, c call) error { // a driver that does not look at its context
			if c.verb == "renew" {
				<-never
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				never = make(chan struct{})
				m := newScript()
				s := session(t, m, locker.WithTTL(ttl))
				begin := time.Now()
				l := lock(t, s, "r")
				ctx, cancel := l.Context(t.Context())
				defer cancel()
				m.on(before, nil)
				<-ctx.Done()
				assert.Equal(t, ttl-ttl/10, time.Since(begin), "trust ends a margin before the lease")
				var lost *locker.LostError
				require.ErrorAs(t, context.Cause(ctx), &lost)
				assert.ErrorIs(t, context.Cause(ctx), locker.ErrLost)
				assert.NotErrorIs(t, lost, locker.ErrNotHeld, "no verdict was heard")
				assert.Equal(t, "r", lost.Lease.Resource)
				assert.Equal(t, l.Err(), error(lost))
				_, err := m.Memory.Get(t.Context(), "r")
				assert.NoError(t, err, "the lease is still there when the context ends")
				m.on(nil, nil)
				close(never)
				assert.ErrorIs(t, l.Release(t.Context()), locker.ErrLost)
				synctest.Wait()
				_, err = m.Memory.Get(t.Context(), "r")
				assert.ErrorIs(t, err, locker.ErrNotHeld, "given back once the holder is done")
			})
		})
	}
}

func TestOneHalfOpenConnectionDoesNotEatTheTrust(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 6 * time.Second
		m := newScript()
		s := session(t, m, locker.WithTTL(ttl))
		l := lock(t, s, "r")
		m.take()
		var hung atomic.Int32
		m.on(func(ctx context.Context, c call) error {
			if hung.Add(1) <= 2 {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}, nil)
		time.Sleep(ttl)
		assert.NoError(t, l.Err())
		calls := m.take()
		require.GreaterOrEqual(t, len(calls), 3)
		assert.Less(t, calls[2].at.Sub(calls[0].at), ttl/2, "two attempts may hang, each for a sixth")
	})
}

func TestOneErrorIsNotALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m, locker.WithTTL(6*time.Second))
		l := lock(t, s, "r")
		var n atomic.Int32
		every := func(_ context.Context, c call) error {
			if n.Add(1)%2 == 1 {
				return errNetwork
			}
			return nil
		}
		m.on(every, nil)
		time.Sleep(time.Minute)
		assert.NoError(t, l.Err())
		m.on(nil, every) // the answer is lost, the renewal was made
		time.Sleep(time.Minute)
		assert.NoError(t, l.Err())
	})
}

func TestAVerdictIsALossAtOnce(t *testing.T) {
	ctx := context.Background()
	for name, c := range map[string]struct {
		do   func(*script)
		want error
	}{
		"forced": {func(m *script) { m.ForceRelease(ctx, "r") }, locker.ErrNotHeld},
		"stolen": {func(m *script) { m.ForceRelease(ctx, "r"); m.Memory.Acquire(ctx, "r", "thief", time.Hour) }, locker.ErrNotOwner},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newScript()
				s := session(t, m, locker.WithTTL(9*time.Second))
				l, safe := lock(t, s, "r"), lock(t, s, "safe")
				ctx, cancel := l.Context(t.Context())
				defer cancel()
				c.do(m)
				before, _ := m.Memory.Get(ctx, "r")
				time.Sleep(3*time.Second + time.Millisecond)
				synctest.Wait()
				require.True(t, ended(ctx), "a third of the TTL is the longest a loss goes unseen")
				assert.ErrorIs(t, context.Cause(ctx), locker.ErrLost)
				assert.ErrorIs(t, context.Cause(ctx), c.want)
				assert.NoError(t, safe.Err())
				err := l.Release(ctx)
				assert.ErrorIs(t, err, locker.ErrLost)
				assert.Same(t, err, l.Release(ctx), "the same answer each time")
				after, _ := m.Memory.Get(t.Context(), "r")
				assert.Equal(t, before.Token, after.Token, "the new holder is left alone")
				m.take()
				time.Sleep(time.Minute)
				for _, call := range m.take() {
					assert.NotEqual(t, "r", call.recs[0].Resource, "a lost lease is not renewed")
				}
			})
		})
	}
}

func TestManyLeasesAreRenewedInOneRequestWithAVerdictForEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 500
		m := newScript()
		s := session(t, m, locker.WithTTL(30*time.Second))
		leases := make([]*locker.Lease, n)
		for i := range leases {
			leases[i] = lock(t, s, fmt.Sprint("r", i))
			time.Sleep(time.Millisecond)
		}
		m.ForceRelease(t.Context(), "r7")
		m.take()
		time.Sleep(10*time.Second + time.Millisecond)
		synctest.Wait()
		assert.Equal(t, 1, m.count("batch"), "taken at different times, renewed together")
		assert.Equal(t, 1, m.count("renew"), "the one that the batch left out")
		for i, l := range leases {
			if i == 7 {
				assert.ErrorIs(t, l.Err(), locker.ErrNotHeld)
			} else {
				assert.NoError(t, l.Err())
				assert.Greater(t, l.Record().Remaining, 29*time.Second)
			}
		}
		m.take()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		assert.Equal(t, 1, m.count("batch"))
		assert.Equal(t, 0, m.count("renew"))
	})
}

// A transaction that guards one row must not cost the other leases their renewals, nor this one its trust.
func TestASkippedRowIsRenewedSinglyAndHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m, locker.WithTTL(30*time.Second))
		guarded, free := lock(t, s, "guarded"), lock(t, s, "free")
		m.ForceRelease(t.Context(), "guarded") // so that the batch leaves it out …
		m.on(func(ctx context.Context, c call) error {
			if c.verb == "renew" {
				select { // … and the single renewal waits, as behind a row lock
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(4 * time.Second):
				}
			}
			return nil
		}, nil)
		time.Sleep(11 * time.Second)
		assert.NoError(t, guarded.Err(), "skipped is not lost")
		assert.Greater(t, free.Record().Remaining, 28*time.Second)
	})
}

func TestWaitersInAProcessGetTheLockInOrderWithOneWriteEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 30
		m := newScript()
		s := session(t, m)
		l := lock(t, s, "r")
		m.take()
		var order []int
		var all sync.WaitGroup
		for i := range n {
			all.Go(func() {
				l, err := s.Lock(t.Context(), "r")
				if !assert.NoError(t, err) {
					return
				}
				order = append(order, i) // under the lock: the race detector would say if it were not
				assert.NoError(t, l.Release(t.Context()))
			})
			synctest.Wait()
		}
		time.Sleep(time.Second)
		assert.Empty(t, m.take(), "nobody asks the database while the process itself has the lock")
		first := l.Token()
		require.NoError(t, l.Release(t.Context()))
		all.Wait()
		for i, got := range order {
			assert.Equal(t, i, got)
		}
		assert.Equal(t, n, m.count("handover"))
		assert.Equal(t, 1, m.count("release"), "the last one's")
		assert.Equal(t, 0, m.count("acquire"))
		last := first
		for _, c := range m.take() {
			if c.verb == "handover" {
				assert.GreaterOrEqual(t, c.recs[0].Token, last)
				last = c.recs[0].Token + 1
			}
		}
	})
}

func TestOnlyTheFirstInLinePollsAndItOnlyReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		held, err := m.Memory.Acquire(t.Context(), "r", "another process", time.Hour)
		require.NoError(t, err)
		s := session(t, m)
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				err := s.Do(t.Context(), "r", func(context.Context, *locker.Lease) error { return nil })
				assert.NoError(t, err)
			})
		}
		time.Sleep(10 * time.Second)
		assert.Equal(t, 1, m.count("acquire"), "the first attempt")
		gets := m.count("get")
		assert.Less(t, gets, 120, "one poller")
		assert.Greater(t, gets, 30)
		require.NoError(t, m.Memory.Release(t.Context(), held))
		released := time.Now()
		all.Wait()
		assert.LessOrEqual(t, time.Since(released), 200*time.Millisecond)
		assert.Equal(t, 2, m.count("acquire"))
	})
}

func TestAWaiterLooksWhenTheHoldersLeaseEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := plain{lockertest.NewMemory()}
		_, err := m.Acquire(t.Context(), "r", "dead", 42*time.Millisecond)
		require.NoError(t, err)
		begin := time.Now()
		_, err = session(t, m).Lock(t.Context(), "r")
		require.NoError(t, err)
		assert.Less(t, time.Since(begin), 50*time.Millisecond)
	})
}

func TestALostAnswerOfAHandoverLosesNothing(t *testing.T) {
	for name, hooks := range map[string][2]func(context.Context, call) error{
		"request lost": {fail("handover"), nil},
		"answer lost":  {nil, fail("handover")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newScript()
				s := session(t, m)
				l := lock(t, s, "r")
				got := make(chan *locker.Lease, 1)
				go func() {
					l, err := s.Lock(t.Context(), "r")
					assert.NoError(t, err)
					got <- l
				}()
				synctest.Wait()
				m.on(hooks[0], hooks[1])
				assert.NoError(t, l.Release(t.Context()))
				next := <-got
				assert.NoError(t, next.Err())
				assert.Greater(t, next.Token(), l.Token())
				rec, err := m.Memory.Get(t.Context(), "r")
				require.NoError(t, err)
				assert.Equal(t, next.Token(), rec.Token)
				m.on(nil, nil)
				require.NoError(t, next.Release(t.Context()))
			})
		})
	}
}

func TestAWaiterMayLeaveAtAnyTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m)
		l := lock(t, s, "r")
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() {
			_, err := s.Lock(ctx, "r")
			assert.ErrorIs(t, err, context.Canceled)
			assert.ErrorIs(t, err, locker.ErrHeld)
		})
		synctest.Wait()
		all.Go(func() {
			assert.NoError(t, s.Do(t.Context(), "r", func(context.Context, *locker.Lease) error { return nil }))
		})
		synctest.Wait()
		m.on(func(_ context.Context, c call) error {
			if c.verb == "handover" {
				cancel() // while the lock is on its way to it
				time.Sleep(time.Millisecond)
			}
			return nil
		}, nil)
		require.NoError(t, l.Release(t.Context()))
		all.Wait()
		_, err := m.Memory.Get(t.Context(), "r")
		assert.ErrorIs(t, err, locker.ErrNotHeld, "nothing stays behind")
	})
}

// While the first in line is asking, a TryLock may come between and be released again. Handed over then, the waiter would have two
// leases, one of them dead, and Close would wait for ever for the callback of the other.
func TestAWaiterWhoIsAskingIsNotHandedTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m)
		slow := true
		m.on(func(_ context.Context, c call) error {
			if c.verb == "acquire" && slow {
				slow = false
				time.Sleep(time.Second)
			}
			return nil
		}, nil)
		done := make(chan error)
		go func() {
			done <- s.Do(t.Context(), "r", func(_ context.Context, l *locker.Lease) error {
				time.Sleep(time.Minute)
				return l.Err()
			})
		}()
		synctest.Wait()
		l := lock(t, s, "r")
		require.NoError(t, l.Release(t.Context()))
		assert.NoError(t, <-done)
		assert.Zero(t, m.count("handover"))
	})
}

// A hand-over whose answer was lost may have made the waiter the holder; if it leaves now, the lock is given back.
func TestAWaiterWhoLeavesAfterALostHandoverGivesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m, locker.WithTTL(time.Hour))
		l := lock(t, s, "r")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := s.Lock(ctx, "r")
			done <- err
		}()
		synctest.Wait()
		m.on(fail("acquire", "get"), func(_ context.Context, c call) error {
			if c.verb == "handover" {
				return errNetwork
			}
			return nil
		})
		require.NoError(t, l.Release(t.Context()))
		cancel()
		assert.ErrorIs(t, <-done, context.Canceled)
		m.on(nil, nil)
		time.Sleep(time.Minute)
		_, err := m.Memory.Get(t.Context(), "r")
		assert.ErrorIs(t, err, locker.ErrNotHeld)
	})
}

func TestHandingOverGivesOtherProcessesTheirChance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := plain2{lockertest.NewMemory()}
		ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
		defer stop()
		var turns [2]int
		var all sync.WaitGroup
		for i := range turns {
			s := session(t, m)
			for range 8 {
				all.Go(func() {
					for ctx.Err() == nil {
						s.Do(ctx, "r", func(context.Context, *locker.Lease) error {
							turns[i]++
							time.Sleep(time.Millisecond)
							return nil
						})
					}
				})
			}
		}
		all.Wait()
		assert.Greater(t, turns[0], 5_000)
		assert.Greater(t, turns[1], 5_000)
	})
}

// plain2 is a Locker that hands over, but has no wake-up.
type plain2 struct{ m *lockertest.Memory }

func (p plain2) Acquire(ctx context.Context, r, o string, ttl time.Duration) (locker.Record, error) {
	return p.m.Acquire(ctx, r, o, ttl)
}
func (p plain2) Renew(ctx context.Context, r locker.Record, ttl time.Duration) (locker.Record, error) {
	return p.m.Renew(ctx, r, ttl)
}
func (p plain2) Release(ctx context.Context, r locker.Record) error { return p.m.Release(ctx, r) }
func (p plain2) Get(ctx context.Context, r string) (locker.Record, error) {
	return p.m.Get(ctx, r)
}
func (p plain2) Handover(ctx context.Context, r locker.Record, o string, ttl time.Duration) (locker.Record, error) {
	return p.m.Handover(ctx, r, o, ttl)
}

func TestWaitingIsBoundedAndSaysWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		_, err := m.Memory.Acquire(t.Context(), "r", "another", time.Hour)
		require.NoError(t, err)
		s := session(t, m)
		begin := time.Now()
		_, err = s.Lock(t.Context(), "r", locker.WithMaxWait(3*time.Second))
		assert.Equal(t, 3*time.Second, time.Since(begin))
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorIs(t, err, locker.ErrHeld)
		var held *locker.HeldError
		require.ErrorAs(t, err, &held)
		assert.Equal(t, "another", held.Holder.Owner)

		m.on(fail("acquire", "get"), nil)
		_, err = s.Lock(t.Context(), "other", locker.WithMaxWait(3*time.Second))
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorIs(t, err, errNetwork)
		assert.NotErrorIs(t, err, locker.ErrHeld)

		permanent := permanentError{errors.New("no such table")}
		m.on(func(context.Context, call) error { return permanent }, nil)
		begin = time.Now()
		_, err = s.Lock(t.Context(), "third")
		assert.Zero(t, time.Since(begin), "waiting does not cure it")
		assert.ErrorIs(t, err, permanent)
		m.on(nil, nil)
	})
}

type permanentError struct{ error }

func (permanentError) Permanent() bool { return true }

func TestWaitingGoesOnWhileTheDatabaseIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m)
		m.on(fail("acquire", "get"), nil)
		time.AfterFunc(time.Minute, func() { m.on(nil, nil) })
		begin := time.Now()
		l, err := s.Lock(t.Context(), "r")
		require.NoError(t, err)
		assert.NoError(t, l.Err())
		assert.Less(t, time.Since(begin), 61*time.Second)
	})
}

// The reply of an acquire was lost after it took effect. The same owner asks again; a library that asks under another one blocks itself.
func TestALostAnswerOfAnAcquireLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m, locker.WithTTL(time.Hour))
		var n atomic.Int32
		m.on(nil, func(_ context.Context, c call) error {
			if c.verb == "acquire" && n.Add(1) <= 3 {
				return errNetwork
			}
			return nil
		})
		begin := time.Now()
		l, err := s.Lock(t.Context(), "r")
		require.NoError(t, err)
		assert.Less(t, time.Since(begin), 2*time.Second)
		rec, err := m.Memory.Get(t.Context(), "r")
		require.NoError(t, err)
		assert.Equal(t, l.Token(), rec.Token)
	})
}

func TestAnAcquireThatIsGivenUpIsGivenBack(t *testing.T) {
	for _, late := range []time.Duration{0, 300 * time.Millisecond} { // the statement may even take effect after it was given up
		t.Run(late.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newScript()
				s := session(t, m, locker.WithTTL(time.Hour))
				m.on(func(ctx context.Context, c call) error {
					if c.verb == "acquire" {
						go func() {
							time.Sleep(late)
							m.Memory.Acquire(context.Background(), "r", c.owner, time.Hour)
						}()
						return errNetwork
					}
					return nil
				}, nil)
				_, err := s.TryLock(t.Context(), "r")
				require.ErrorIs(t, err, errNetwork)
				time.Sleep(3 * time.Second)
				_, err = m.Memory.Get(t.Context(), "r")
				assert.ErrorIs(t, err, locker.ErrNotHeld)
				for _, c := range m.take() {
					if c.verb == "release" {
						assert.NotZero(t, c.recs[0].Token, "only the exact grant is freed")
					}
				}
			})
		})
	}
}

// A delayed give-back by owner alone freed a later grant of that owner, and then two held it.
func TestOwnersAreNeverUsedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		a, b := session(t, m, locker.WithOwner("worker")), session(t, m, locker.WithOwner("worker"))
		seen := map[string]bool{}
		for range 10 {
			for _, s := range []*locker.Session{a, b} {
				l := lock(t, s, "r")
				owner := l.Record().Owner
				assert.True(t, strings.HasPrefix(owner, "worker/"))
				assert.False(t, seen[owner])
				seen[owner] = true
				_, err := b.TryLock(t.Context(), "r")
				assert.ErrorIs(t, err, locker.ErrHeld)
				_, err = a.TryLock(t.Context(), "r")
				assert.ErrorIs(t, err, locker.ErrHeld)
				require.NoError(t, l.Release(t.Context()))
			}
		}
	})
}

func TestDo(t *testing.T) {
	var errWork = errors.New("work failed")
	run := func(name string, test func(t *testing.T, m *script, s *locker.Session)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newScript()
				test(t, m, session(t, m, locker.WithTTL(9*time.Second)))
				synctest.Wait()
				m.on(nil, nil)
				_, err := m.Memory.Get(t.Context(), "r")
				assert.ErrorIs(t, err, locker.ErrNotHeld, "free afterwards")
			})
		})
	}
	run("returns what fn returns", func(t *testing.T, m *script, s *locker.Session) {
		assert.NoError(t, s.Do(t.Context(), "r", func(ctx context.Context, l *locker.Lease) error {
			_, err := m.Memory.Get(ctx, "r")
			return errors.Join(err, l.Err())
		}))
		assert.Equal(t, errWork, s.Do(t.Context(), "r", func(context.Context, *locker.Lease) error { return errWork }))
	})
	run("releases when fn panics", func(t *testing.T, m *script, s *locker.Session) {
		assert.PanicsWithValue(t, "boom", func() {
			s.Do(t.Context(), "r", func(context.Context, *locker.Lease) error { panic("boom") })
		})
	})
	run("says that the lease was lost even if fn does not", func(t *testing.T, m *script, s *locker.Session) {
		for _, result := range []error{nil, errWork} {
			err := s.Do(t.Context(), "r", func(ctx context.Context, _ *locker.Lease) error {
				m.ForceRelease(ctx, "r")
				<-ctx.Done()
				assert.ErrorIs(t, context.Cause(ctx), locker.ErrLost)
				return result
			})
			assert.ErrorIs(t, err, locker.ErrLost)
			assert.ErrorIs(t, err, locker.ErrNotHeld)
			if result != nil {
				assert.ErrorIs(t, err, errWork)
			}
		}
	})
	run("says so too if nobody had noticed before the release", func(t *testing.T, m *script, s *locker.Session) {
		err := s.Do(t.Context(), "r", func(ctx context.Context, _ *locker.Lease) error {
			m.ForceRelease(ctx, "r")
			return nil
		})
		assert.ErrorIs(t, err, locker.ErrLost)
	})
	run("is nil if only the release failed", func(t *testing.T, m *script, s *locker.Session) {
		assert.NoError(t, s.Do(t.Context(), "r", func(context.Context, *locker.Lease) error {
			m.on(fail("release"), nil)
			return nil
		}))
		time.Sleep(9 * time.Second)
	})
	run("works and releases under a ctx that ended", func(t *testing.T, m *script, s *locker.Session) {
		ctx, cancel := context.WithCancel(t.Context())
		assert.ErrorIs(t, s.Do(ctx, "r", func(ctx context.Context, _ *locker.Lease) error {
			cancel()
			<-ctx.Done()
			return ctx.Err()
		}), context.Canceled)
	})
	run("TryDo tells a skip from an ErrHeld of fn", func(t *testing.T, m *script, s *locker.Session) {
		ran, err := s.TryDo(t.Context(), "r", func(ctx context.Context, _ *locker.Lease) error {
			ran, err := s.TryDo(ctx, "r", func(context.Context, *locker.Lease) error { panic("held") })
			assert.False(t, ran)
			assert.NoError(t, err)
			return &locker.HeldError{}
		})
		assert.True(t, ran)
		assert.ErrorIs(t, err, locker.ErrHeld)
	})
}

func TestReleaseIsIdempotentAndBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m)
		l := lock(t, s, "r")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() { assert.NoError(t, l.Release(ctx), "also under a cancelled ctx") })
		}
		all.Wait()
		assert.Equal(t, 1, m.count("release"))

		l = lock(t, s, "r")
		m.on(nil, fail("release")) // freed, but the answer is lost once: the second finds nothing of ours
		time.AfterFunc(time.Millisecond, func() { m.on(nil, nil) })
		assert.NoError(t, l.Release(ctx))

		l = lock(t, s, "r")
		m.on(hang("release"), nil)
		begin := time.Now()
		err := l.Release(ctx)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.NotErrorIs(t, err, locker.ErrLost)
		assert.LessOrEqual(t, time.Since(begin), 10*time.Second)
		assert.Equal(t, err, l.Release(ctx))
		m.on(nil, nil)
	})
}

func TestMinHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m, locker.WithTTL(3*time.Second))
		begin := time.Now()
		ran, err := s.TryDo(t.Context(), "cron", func(context.Context, *locker.Lease) error {
			time.Sleep(4 * time.Second)
			return nil
		}, locker.WithMinHold(time.Minute))
		require.NoError(t, err)
		require.True(t, ran)
		assert.Equal(t, 4*time.Second, time.Since(begin))
		time.Sleep(time.Until(begin.Add(59 * time.Second)))
		ran, err = s.TryDo(t.Context(), "cron", func(context.Context, *locker.Lease) error { panic("runs twice") })
		require.NoError(t, err)
		assert.False(t, ran)
		_, err = session(t, m).Lock(t.Context(), "cron")
		require.NoError(t, err)
		assert.InDelta(t, time.Minute.Seconds(), time.Since(begin).Seconds(), 0.3)

		long := lock(t, s, "long", locker.WithMinHold(time.Second))
		time.Sleep(2 * time.Second)
		require.NoError(t, long.Release(t.Context()))
		_, err = m.Memory.Get(t.Context(), "long")
		assert.ErrorIs(t, err, locker.ErrNotHeld, "held long enough: released")
	})
}

// A renewal that is under way when the holder is done must not undo what the release does.
func TestAReleaseWaitsForTheRenewalUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m, locker.WithTTL(12*time.Second))
		l := lock(t, s, "r", locker.WithMinHold(time.Hour))
		m.on(func(_ context.Context, c call) error {
			if m.count("renew") == 1 {
				time.Sleep(time.Second) // the heartbeat's
			}
			return nil
		}, nil)
		time.Sleep(4*time.Second + time.Millisecond)
		require.NoError(t, l.Release(t.Context()))
		time.Sleep(time.Minute)
		_, err := m.Memory.Get(t.Context(), "r")
		assert.NoError(t, err, "held for an hour")
	})
}

func TestClose(t *testing.T) {
	t.Run("waits for callbacks, releases, refuses", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newScript()
			s, err := locker.NewSession(m, locker.WithTTL(3*time.Second))
			require.NoError(t, err)
			loose := lock(t, s, "loose")
			looseCtx, cancel := loose.Context(t.Context())
			defer cancel()
			_, err = m.Memory.Acquire(t.Context(), "held", "another", time.Hour)
			require.NoError(t, err)
			var all sync.WaitGroup
			all.Go(func() {
				assert.NoError(t, s.Do(t.Context(), "r", func(ctx context.Context, l *locker.Lease) error {
					<-ctx.Done()
					assert.ErrorIs(t, context.Cause(ctx), locker.ErrClosed)
					time.Sleep(time.Minute) // winding up takes its time, and the lock stays
					rec, err := m.Memory.Get(context.WithoutCancel(ctx), "r")
					assert.NoError(t, err)
					assert.Equal(t, l.Token(), rec.Token)
					return nil
				}))
			})
			all.Go(func() {
				_, err := s.Lock(t.Context(), "held")
				assert.ErrorIs(t, err, locker.ErrClosed)
			})
			time.Sleep(time.Second)
			begin := time.Now()
			require.NoError(t, s.Close(t.Context()))
			assert.Equal(t, time.Minute, time.Since(begin))
			all.Wait()
			assert.ErrorIs(t, context.Cause(looseCtx), locker.ErrClosed)
			assert.ErrorIs(t, loose.Err(), locker.ErrClosed)
			for _, r := range []string{"r", "loose"} {
				_, err := m.Memory.Get(t.Context(), r)
				assert.ErrorIs(t, err, locker.ErrNotHeld)
			}
			_, err = s.TryLock(t.Context(), "x")
			assert.ErrorIs(t, err, locker.ErrClosed)
			_, err = s.Lock(t.Context(), "x")
			assert.ErrorIs(t, err, locker.ErrClosed)
			assert.NoError(t, s.Close(t.Context()), "again")
		})
	})
	t.Run("gives up at the end of ctx and frees nothing under a callback", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newScript()
			s, err := locker.NewSession(m, locker.WithTTL(3*time.Second))
			require.NoError(t, err)
			done := make(chan struct{})
			go func() {
				defer close(done)
				s.Do(t.Context(), "r", func(ctx context.Context, l *locker.Lease) error {
					time.Sleep(20 * time.Second)
					return nil
				})
			}()
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second+time.Millisecond)
			defer cancel()
			assert.ErrorIs(t, s.Close(ctx), context.DeadlineExceeded)
			m.take()
			_, err = m.Memory.Get(t.Context(), "r")
			assert.NoError(t, err)
			time.Sleep(3 * time.Second)
			_, err = m.Memory.Get(t.Context(), "r")
			assert.ErrorIs(t, err, locker.ErrNotHeld, "it expires by itself")
			for _, c := range m.take() {
				assert.NotEqual(t, "renew", c.verb, "the heartbeat has stopped")
			}
			<-done
		})
	})
}

func TestManyGoroutinesOneAtATime(t *testing.T) {
	m := lockertest.NewMemory()
	var inside, count atomic.Int32
	var all sync.WaitGroup
	for range 3 {
		s := session(t, m)
		for range 8 {
			all.Go(func() {
				for range 30 {
					assert.NoError(t, s.Do(t.Context(), "r", func(context.Context, *locker.Lease) error {
						assert.EqualValues(t, 1, inside.Add(1))
						count.Add(1)
						inside.Add(-1)
						return nil
					}))
				}
			})
		}
	}
	all.Wait()
	assert.EqualValues(t, 3*8*30, count.Load())
}

func TestSessionOptionsAreChecked(t *testing.T) {
	m := lockertest.NewMemory()
	for name, o := range map[string]locker.SessionOption{
		"ttl 0":           locker.WithTTL(0),
		"ttl too long":    locker.WithTTL(locker.MaxTTL + 1),
		"max wait 0":      locker.WithMaxWait(0),
		"min hold < 0":    locker.WithMinHold(-1),
		"owner empty":     locker.WithOwner(""),
		"owner too long":  locker.WithOwner(strings.Repeat("x", 201)),
		"owner not UTF-8": locker.WithOwner("\xff"),
		"no logger":       locker.WithLogger(nil),
		"skew over ttl/2": locker.WithTTL(3 * time.Second),
	} {
		_, err := locker.NewSession(skewed{m}, o)
		assert.ErrorIs(t, err, locker.ErrInvalid, name)
	}
	_, err := locker.NewSession(nil)
	assert.ErrorIs(t, err, locker.ErrInvalid)
	s := session(t, skewed{m})
	_, err = s.TryLock(t.Context(), "r", locker.WithTTL(3*time.Second))
	assert.ErrorIs(t, err, locker.ErrInvalid)
	_, err = s.Lock(t.Context(), "")
	assert.ErrorIs(t, err, locker.ErrInvalid)
}

func TestTheMarginIsTheTables(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, skewed{m}, locker.WithTTL(10*time.Second))
		begin := time.Now()
		l := lock(t, s, "r")
		assert.Equal(t, 8*time.Second, l.TrustedUntil().Sub(begin))
		m.on(fail("renew"), nil)
		ctx, cancel := l.Context(t.Context())
		defer cancel()
		<-ctx.Done()
		assert.Equal(t, 8*time.Second, time.Since(begin))
		m.on(nil, nil)
	})
}

type skewed struct{ locker.Locker }

func (skewed) ClockSkew() time.Duration { return 2 * time.Second }

// A slow or blocked log handler must not keep a context from ending: losses are logged when things go wrong, and then handlers block.
func TestALogHandlerThatBlocksHoldsUpNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		unblock := make(chan struct{})
		s := session(t, m, locker.WithTTL(10*time.Second), locker.WithLogger(slog.New(blocking{unblock})))
		l := lock(t, s, "r")
		ctx, cancel := l.Context(t.Context())
		defer cancel()
		m.on(fail("renew"), nil)
		<-ctx.Done()
		assert.Equal(t, 9*time.Second, time.Since(l.Record().AcquiredAt).Round(time.Millisecond))
		close(unblock)
		m.on(nil, nil)
	})
}

type blocking struct{ until chan struct{} }

func (blocking) Enabled(context.Context, slog.Level) bool { return true }
func (b blocking) Handle(context.Context, slog.Record) error {
	<-b.until
	return nil
}
func (b blocking) WithAttrs([]slog.Attr) slog.Handler { return b }
func (b blocking) WithGroup(string) slog.Handler      { return b }

// When Close returns, nothing that the session has asked for stays held: a process that exits then must not block a name for a TTL.
func TestCloseLeavesNothingBehind(t *testing.T) {
	for _, waiting := range []bool{true, false} {
		t.Run(fmt.Sprint("waiting ", waiting), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newScript()
				s, err := locker.NewSession(m, locker.WithTTL(time.Hour))
				require.NoError(t, err)
				m.on(nil, func(ctx context.Context, c call) error { // granted, but the answer does not come
					if c.verb == "acquire" {
						if !waiting {
							<-ctx.Done()
						}
						return errNetwork
					}
					return nil
				})
				done := make(chan error)
				go func() {
					take := s.TryLock
					if waiting {
						take = s.Lock
					}
					_, err := take(t.Context(), "r")
					done <- err
				}()
				synctest.Wait()
				require.NoError(t, s.Close(t.Context()))
				_, err = m.Memory.Get(t.Context(), "r")
				assert.ErrorIs(t, err, locker.ErrNotHeld)
				assert.ErrorIs(t, <-done, locker.ErrClosed)
			})
		})
	}
}

// An engine without the batch's statement, or one record that spoils it, must not cost all leases.
func TestLeasesAreRenewedSinglyWhereTheBatchFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m, locker.WithTTL(30*time.Second))
		m.on(fail("batch"), nil)
		a, b := lock(t, s, "a"), lock(t, s, "b")
		time.Sleep(10 * time.Minute)
		assert.NoError(t, a.Err())
		assert.NoError(t, b.Err())
	})
}

// Rows that block, however many, cost no other lease its renewal.
func TestBlockedRowsHoldUpNoOtherLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, plain{m}, locker.WithTTL(30*time.Second))
		var free []*locker.Lease
		for i := range 80 {
			l := lock(t, s, fmt.Sprint(i))
			if i%2 == 0 {
				free = append(free, l)
			}
		}
		m.on(func(ctx context.Context, c call) error {
			if c.verb == "renew" && strings.ContainsAny(c.recs[0].Resource[len(c.recs[0].Resource)-1:], "13579") {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}, nil)
		time.Sleep(2 * time.Minute)
		for _, l := range free {
			assert.NoError(t, l.Err(), l.Record().Resource)
		}
		m.on(nil, nil)
	})
}

// What is said of a held lock is true when it is said.
func TestTheAnswerForThoseBehindTheFirstInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		_, err := m.Memory.Acquire(t.Context(), "r", "another", time.Second)
		require.NoError(t, err)
		s := session(t, plain{m})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := s.Lock(ctx, "r")
			done <- err
		}()
		synctest.Wait()
		m.on(fail("acquire", "get"), nil)
		_, err = s.TryLock(t.Context(), "r")
		var held *locker.HeldError
		require.ErrorAs(t, err, &held)
		assert.Equal(t, "another", held.Holder.Owner)
		assert.Positive(t, held.Holder.Remaining)
		time.Sleep(time.Minute) // its lease is long over, and nobody knows who has it now
		_, err = s.TryLock(t.Context(), "r")
		assert.ErrorIs(t, err, errNetwork)
		assert.NotErrorIs(t, err, locker.ErrHeld)
		_, err = s.Lock(t.Context(), "r", locker.WithMaxWait(time.Second))
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorIs(t, err, errNetwork, "the second in line says why as well")
		cancel()
		assert.ErrorIs(t, <-done, context.Canceled)
		m.on(nil, nil)
	})
}

// A look that is cut off by the end of the wait does not hide what stood in the way.
func TestAWaitThatEndsDuringALookSaysHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		_, err := m.Memory.Acquire(t.Context(), "r", "another", time.Hour)
		require.NoError(t, err)
		m.on(func(ctx context.Context, c call) error {
			if c.verb != "get" {
				return nil
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Second):
				return nil
			}
		}, nil)
		_, err = session(t, plain{m}).Lock(t.Context(), "r", locker.WithMaxWait(3500*time.Millisecond))
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorIs(t, err, locker.ErrHeld)
	})
}

// Granted, forced, granted again, and the first answer comes last: only the newer lease may be trusted.
func TestCrossedAnswersLeaveOneLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m)
		var n atomic.Int32
		m.on(nil, func(_ context.Context, c call) error {
			if c.verb == "acquire" && n.Add(1) == 1 {
				time.Sleep(time.Second)
			}
			return nil
		})
		done := make(chan error)
		go func() {
			_, err := s.TryLock(t.Context(), "r")
			done <- err
		}()
		synctest.Wait()
		m.ForceRelease(t.Context(), "r")
		l := lock(t, s, "r")
		assert.Error(t, <-done)
		assert.NoError(t, l.Err())
		time.Sleep(time.Minute)
		assert.NoError(t, l.Err())
	})
}

// A Waiter that wakes too early makes nobody spin.
func TestEarlyWakeUpsDoNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		_, err := m.Memory.Acquire(t.Context(), "r", "another", time.Hour)
		require.NoError(t, err)
		s := session(t, early{m})
		_, err = s.Lock(t.Context(), "r", locker.WithMaxWait(10*time.Second))
		assert.ErrorIs(t, err, locker.ErrHeld)
		assert.Less(t, m.count("get"), 250)
	})
}

type early struct{ *script }

func (early) WaitFree(context.Context, locker.Record) error { return nil }

func TestDoDoesNotStartUnderAContextThatEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m)
		ctx, cancel := context.WithCancel(t.Context())
		m.on(nil, func(_ context.Context, c call) error {
			if c.verb == "acquire" {
				cancel()
			}
			return nil
		})
		err := s.Do(ctx, "r", func(context.Context, *locker.Lease) error { panic("runs") })
		assert.ErrorIs(t, err, context.Canceled)
		_, err = m.Memory.Get(t.Context(), "r")
		assert.ErrorIs(t, err, locker.ErrNotHeld)
	})
}

// A program that is told to stop often closes with a context that has ended: that releases all the same.
func TestCloseUnderAContextThatEndedReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s, err := locker.NewSession(m)
		require.NoError(t, err)
		lock(t, s, "a")
		lock(t, s, "b")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, s.Close(ctx))
		for _, r := range []string{"a", "b"} {
			_, err := m.Memory.Get(t.Context(), r)
			assert.ErrorIs(t, err, locker.ErrNotHeld)
		}

		s, err = locker.NewSession(m)
		require.NoError(t, err)
		lock(t, s, "a")
		m.on(hang("release"), nil)
		begin := time.Now()
		assert.ErrorIs(t, s.Close(ctx), context.DeadlineExceeded)
		assert.LessOrEqual(t, time.Since(begin), 10*time.Second)
	})
}

// After Close the contexts have ended already; a loss on top of that is what Err says.
func TestALossAfterCloseIsSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s, err := locker.NewSession(m, locker.WithTTL(3*time.Second))
		require.NoError(t, err)
		done := make(chan error)
		go func() {
			done <- s.Do(t.Context(), "r", func(ctx context.Context, l *locker.Lease) error {
				<-ctx.Done()
				assert.ErrorIs(t, l.Err(), locker.ErrClosed)
				m.ForceRelease(t.Context(), "r")
				time.Sleep(2 * time.Second)
				assert.ErrorIs(t, l.Err(), locker.ErrLost)
				return nil
			})
		}()
		synctest.Wait()
		require.NoError(t, s.Close(t.Context()))
		assert.ErrorIs(t, <-done, locker.ErrLost)
	})
}

// A half-open connection under a renewal does not cost the release its time.
func TestAReleaseDoesNotWaitForARenewalThatHangs(t *testing.T) {
	for _, hold := range []time.Duration{0, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			m := newScript()
			s := session(t, m, locker.WithTTL(10*time.Minute))
			l := lock(t, s, "r", locker.WithMinHold(hold))
			var n atomic.Int32
			m.on(func(_ context.Context, c call) error {
				if c.verb == "renew" && n.Add(1) == 1 {
					time.Sleep(30 * time.Second) // it arrives at last, late
				}
				return nil
			}, nil)
			time.Sleep(200*time.Second + time.Millisecond)
			begin := time.Now()
			require.NoError(t, l.Release(t.Context()))
			assert.LessOrEqual(t, time.Since(begin), time.Second)
			time.Sleep(11 * time.Minute)
			_, err := m.Memory.Get(t.Context(), "r")
			if hold == 0 {
				assert.ErrorIs(t, err, locker.ErrNotHeld)
			} else {
				assert.NoError(t, err)
			}
		})
	}
}

// The lock is on its way to a waiter while another goroutine takes and frees it: the waiter must find it all the same, and so must
// those who come later.
func TestALineOutlivesACrossingLock(t *testing.T) {
	for name, c := range map[string]struct {
		ttl   time.Duration
		force bool
	}{"the hand-over is refused": {time.Minute, true}, "its answer comes too late": {time.Second, false}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newScript()
				s := session(t, m)
				var n atomic.Int32
				m.on(func(_ context.Context, call call) error {
					switch {
					case call.verb == "acquire" && n.Add(1) == 1:
						time.Sleep(2 * time.Second) // waits for a connection
					case call.verb == "handover" && c.force:
						time.Sleep(3 * time.Second)
					}
					return nil
				}, func(_ context.Context, call call) error {
					if call.verb == "handover" && !c.force {
						time.Sleep(3 * time.Second)
					}
					return nil
				})
				var all sync.WaitGroup
				all.Go(func() {
					if l, err := s.TryLock(t.Context(), "r"); err == nil {
						l.Release(t.Context())
					}
				})
				time.Sleep(10 * time.Millisecond)
				a := lock(t, s, "r")
				for i := range 2 {
					all.Go(func() {
						time.Sleep(time.Duration(i) * 5 * time.Second)
						ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
						defer cancel()
						l, err := s.Lock(ctx, "r", locker.WithTTL(c.ttl))
						if assert.NoError(t, err, i) {
							l.Release(t.Context())
						}
					})
				}
				time.Sleep(500 * time.Millisecond)
				if c.force {
					m.ForceRelease(t.Context(), "r")
				}
				a.Release(t.Context())
				all.Wait()
			})
		})
	}
}

// Close waits for releases that others have begun, and sends nothing after it has returned.
func TestCloseWaitsForReleasesUnderWay(t *testing.T) {
	for _, waiter := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := newScript()
			s, err := locker.NewSession(m)
			require.NoError(t, err)
			l := lock(t, s, "r")
			m.on(nil, func(_ context.Context, c call) error {
				if c.verb == "release" || c.verb == "handover" {
					time.Sleep(time.Second)
				}
				return nil
			})
			if waiter {
				go s.Lock(t.Context(), "r")
				synctest.Wait()
			}
			go l.Release(t.Context())
			synctest.Wait()
			require.NoError(t, s.Close(t.Context()))
			m.take()
			_, err = m.Memory.Get(t.Context(), "r")
			assert.ErrorIs(t, err, locker.ErrNotHeld)
			time.Sleep(time.Minute)
			assert.Empty(t, m.take())
		})
	}
}

// A batch that fails for the leases of one TTL does not hide behind one that works for another.
func TestEachTTLHasItsOwnBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newScript()
		s := session(t, m)
		long := []*locker.Lease{lock(t, s, "long1"), lock(t, s, "long2")}
		lock(t, s, "short1", locker.WithTTL(time.Second))
		lock(t, s, "short2", locker.WithTTL(time.Second))
		m.on(func(_ context.Context, c call) error {
			if c.verb == "batch" && strings.HasPrefix(c.recs[0].Resource, "long") {
				return errNetwork
			}
			return nil
		}, nil)
		time.Sleep(2 * time.Minute)
		for _, l := range long {
			assert.NoError(t, l.Err())
		}
		m.on(nil, nil)
	})
}

// A renewal may move the token (row leases do); a release that is sent meanwhile follows it.
func TestAReleaseFollowsATokenThatMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := moving{newScript()}
		s := session(t, plain{m}, locker.WithTTL(30*time.Second))
		l := lock(t, s, "r")
		time.Sleep(10*time.Second + 50*time.Millisecond) // the renewal is made, its answer on the way
		require.NoError(t, l.Release(t.Context()))
		_, err := m.Memory.Get(t.Context(), "r")
		assert.ErrorIs(t, err, locker.ErrNotHeld)
	})
}

type moving struct{ *script }

func (m moving) Renew(ctx context.Context, r locker.Record, ttl time.Duration) (locker.Record, error) {
	if _, err := m.script.Renew(ctx, r, ttl); err != nil {
		return r, err
	}
	rec, err := m.Memory.Acquire(ctx, r.Resource, r.Owner, ttl)
	time.Sleep(100 * time.Millisecond)
	return rec, err
}

func TestReleaseWith(t *testing.T) {
	const ttl = 3 * time.Second
	run := func(name string, test func(*testing.T, *script, *locker.Session, *locker.Lease)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newScript()
				s := session(t, m, locker.WithTTL(ttl))
				l := lock(t, s, "r")
				test(t, m, s, l)
				synctest.Wait()
			})
		})
	}
	free := func(m *script) func(context.Context, locker.Record) error {
		return func(ctx context.Context, rec locker.Record) error { return m.Memory.Release(ctx, rec) }
	}
	isFree := func(t *testing.T, m *script) {
		t.Helper()
		_, err := m.Memory.Get(t.Context(), "r")
		assert.ErrorIs(t, err, locker.ErrNotHeld)
	}
	run("frees once", func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
		ctx, cancel := l.Context(t.Context())
		defer cancel()
		require.NoError(t, l.ReleaseWith(t.Context(), free(m)))
		isFree(t, m)
		assert.True(t, ended(ctx))
		assert.ErrorIs(t, l.Err(), locker.ErrNotHeld)
		m.take()
		assert.NoError(t, l.Release(t.Context()))
		assert.ErrorIs(t, l.ReleaseWith(t.Context(), free(m)), locker.ErrNotHeld, "not twice")
		time.Sleep(time.Minute)
		assert.Empty(t, m.take(), "nothing more is sent")
	})
	run("keeps renewals out", func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
		require.NoError(t, l.ReleaseWith(t.Context(), func(ctx context.Context, rec locker.Record) error {
			m.take()
			time.Sleep(2 * time.Second) // a beat is at one second
			assert.Zero(t, m.count("renew")+m.count("batch"))
			assert.NoError(t, ctx.Err())
			return m.Memory.Release(ctx, rec)
		}))
	})
	run("waits for the renewal under way", func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
		var over atomic.Bool
		m.on(func(_ context.Context, c call) error {
			if c.verb == "renew" {
				time.Sleep(300 * time.Millisecond)
				over.Store(true)
			}
			return nil
		}, nil)
		time.Sleep(1100 * time.Millisecond) // in the middle of it
		require.NoError(t, l.ReleaseWith(t.Context(), func(ctx context.Context, rec locker.Record) error {
			assert.True(t, over.Load())
			return m.Memory.Release(ctx, rec)
		}))
	})
	run("an error leaves the lease as it was", func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
		no := errors.New("constraint violated")
		assert.Equal(t, no, l.ReleaseWith(t.Context(), func(context.Context, locker.Record) error { return no }))
		assert.PanicsWithValue(t, "oops", func() {
			l.ReleaseWith(t.Context(), func(context.Context, locker.Record) error { panic("oops") })
		})
		time.Sleep(time.Minute)
		assert.NoError(t, l.Err(), "and it is renewed")
		require.NoError(t, l.Release(t.Context()))
		isFree(t, m)
	})
	run("a verdict is a loss", func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
		err := l.ReleaseWith(t.Context(), func(context.Context, locker.Record) error { return fmt.Errorf("finish: %w", locker.ErrNotOwner) })
		var lost *locker.LostError
		require.ErrorAs(t, err, &lost)
		assert.ErrorIs(t, err, locker.ErrNotOwner)
		assert.Equal(t, err, l.Err())
		assert.Equal(t, err, l.Release(t.Context()))
	})
	run("trust ends meanwhile", func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
		err := l.ReleaseWith(t.Context(), func(ctx context.Context, _ locker.Record) error {
			<-ctx.Done()
			return ctx.Err()
		})
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorIs(t, l.Err(), locker.ErrLost)
		assert.ErrorIs(t, l.Release(t.Context()), locker.ErrLost)
	})
	for name, end := range map[string]func(*locker.Session, *locker.Lease) error{
		"release waits for it": func(_ *locker.Session, l *locker.Lease) error { return l.Release(context.Background()) },
		"close waits for it":   func(s *locker.Session, _ *locker.Lease) error { return s.Close(context.Background()) },
	} {
		run(name, func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
			over := make(chan error, 1)
			require.NoError(t, l.ReleaseWith(t.Context(), func(ctx context.Context, rec locker.Record) error {
				go func() { over <- end(s, l) }()
				synctest.Wait()
				assert.Empty(t, over)
				return m.Memory.Release(ctx, rec)
			}))
			assert.NoError(t, <-over)
			assert.Zero(t, m.count("release"))
		})
	}
	run("the next in line gets it", func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
		next := make(chan *locker.Lease, 1)
		go func() {
			l, err := s.Lock(t.Context(), "r")
			assert.NoError(t, err)
			next <- l
		}()
		synctest.Wait()
		require.NoError(t, l.ReleaseWith(t.Context(), free(m)))
		after := <-next
		assert.Greater(t, after.Token(), l.Token())
		require.NoError(t, after.Release(t.Context()))
	})
	run("in do", func(t *testing.T, m *script, s *locker.Session, l *locker.Lease) {
		err := s.Do(t.Context(), "other", func(ctx context.Context, l *locker.Lease) error { return l.ReleaseWith(ctx, free(m)) })
		assert.NoError(t, err)
		err = s.Do(t.Context(), "other", func(ctx context.Context, l *locker.Lease) error {
			return l.ReleaseWith(ctx, func(context.Context, locker.Record) error { return locker.ErrNotHeld })
		})
		assert.ErrorIs(t, err, locker.ErrLost)
	})
}
