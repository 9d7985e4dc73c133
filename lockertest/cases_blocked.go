package lockertest

import (
	"context"
	"errors"
	"time"

	"github.com/locker-go/locker"
)

// blockedTTL is the ttl of a lease that is asked for while the store makes it wait.
func blockedTTL(c *check) time.Duration { return c.ttl(time.Second) }

// block makes changes of resource wait until the function that it returns is called.
func block(c *check, resource string) (unblock func()) {
	c.t.Helper()
	unblock, err := c.Locker.(Blocker).Block(c.ctx, resource)
	if err != nil {
		c.Fatalf("Block(%q): %v", resource, err)
	}
	return unblock
}

// blocked sends call while resource is blocked for wait, and returns what it answered and when the block was taken away. The wait is
// what is tested, so it is spent in any case. Whether call reaches the store in the meantime nobody can see from here; on a machine
// that is too slow for it the case shows nothing, and does not fail.
func blocked(c *check, resource string, wait time.Duration, call func(locker.Locker) (locker.Record, error)) (locker.Record, time.Time, error) {
	type answer struct {
		rec locker.Record
		err error
	}
	unblock := block(c, resource)
	done := make(chan answer, 1)
	go func() {
		rec, err := call(c.lockers[1])
		done <- answer{rec, err}
	}()
	time.Sleep(wait)
	unblocked := time.Now()
	unblock()
	a := <-done
	return a.rec, unblocked, a.err
}

// beyond is a wait from within a lease of ttl to beyond its end. What is shorter than some 25 ms a Locker may take for the way to
// its store.
func beyond(ttl time.Duration) time.Duration { return max(ttl*5/4, ttl+30*time.Millisecond) }

// full checks that the lease that was given after a wait is a full one: that at least three quarters of it were left when the wait
// ended, as Get tells it.
func full(c *check, verb string, rec locker.Record, unblocked time.Time) {
	c.t.Helper()
	ttl := blockedTTL(c)
	least := ttl*3/4 - slack(ttl)
	c.record(rec, rec.Resource, rec.Owner, ttl)
	asked := time.Now()
	got, err := c.Get(c.ctx, rec.Resource)
	told := time.Now()
	spent := told.Sub(unblocked) + told.Sub(asked)
	switch {
	case errors.Is(err, locker.ErrNotHeld) && spent >= least:
		// Too slow a machine to say more.
	case err != nil:
		c.Errorf("%s gave %v, and %v after the wait Get says: %v", verb, ttl, spent, err)
	case got.Remaining < least-spent:
		c.Errorf("%s gave %v, but %v after the wait only %v were left", verb, ttl, spent, got.Remaining)
	}
}

func blockedRenew(c *check) {
	ttl := blockedTTL(c)
	if c.can(varying) {
		// Within the lease: it is there to be renewed.
		rec := c.acquire(c, c.name("live"), "owner-1", c.long)
		renewed, unblocked, err := blocked(c, rec.Resource, ttl*6/10, func(l locker.Locker) (locker.Record, error) {
			return l.Renew(c.ctx, rec, ttl)
		})
		if err != nil {
			c.Fatalf("Renew: %v, want it renewed", err)
		}
		full(c, "Renew", renewed, unblocked)
	}

	// Beyond its end: refused, or a lease that is one.
	rec := c.acquire(c, c.name("ends"), "owner-1", ttl)
	renewed, unblocked, err := blocked(c, rec.Resource, beyond(ttl), func(l locker.Locker) (locker.Record, error) {
		return l.Renew(c.ctx, rec, ttl)
	})
	switch {
	case err == nil:
		full(c, "Renew of a lease that ended meanwhile", renewed, unblocked)
	default:
		c.want(err, locker.ErrNotHeld, "renewal of a lease that ended while it waited")
		c.free(c, rec.Resource)
	}
}

func blockedAcquire(c *check) {
	ttl := blockedTTL(c)
	wait := ttl * 6 / 10
	if c.fixed != 0 {
		wait = beyond(ttl) // a part of a short lease is too little to tell
	}
	dead := c.expired(c, c.name("expired"), "owner-1")
	rec, unblocked, err := blocked(c, dead.Resource, wait, func(l locker.Locker) (locker.Record, error) {
		return l.Acquire(c.ctx, dead.Resource, "owner-2", ttl)
	})
	if err != nil {
		c.Fatalf("Acquire of an expired lock: %v, want a grant", err)
	}
	full(c, "Acquire of an expired lock", rec, unblocked)
	if rec.Token <= dead.Token {
		c.Errorf("token %d is not higher than that of the expired grant, %d", rec.Token, dead.Token)
	}
	if !c.can(varying) {
		return
	}

	// Its own, which is longer than the new ttl.
	first := c.acquire(c, c.name("again"), "owner-1", c.long)
	rec, unblocked, err = blocked(c, first.Resource, wait, func(l locker.Locker) (locker.Record, error) {
		return l.Acquire(c.ctx, first.Resource, "owner-1", ttl)
	})
	if err != nil {
		c.Fatalf("Acquire by the same owner: %v, want a grant", err)
	}
	full(c, "Acquire by the same owner", rec, unblocked)
}

func blockedContext(c *check) {
	const patience = 100 * time.Millisecond
	dead := c.expired(c, c.name("expired"), "owner-1")
	live := c.acquire(c, c.name("live"), "owner-1", c.long)

	for _, call := range []struct {
		verb string
		rec  locker.Record
		do   func(context.Context) error
	}{
		{"Acquire", dead, func(ctx context.Context) error {
			_, err := c.lockers[1].Acquire(ctx, dead.Resource, "owner-2", c.long)
			return err
		}},
		{"Renew", live, func(ctx context.Context) error {
			_, err := c.lockers[1].Renew(ctx, live, c.long)
			return err
		}},
		{"Release", live, func(ctx context.Context) error { return c.lockers[1].Release(ctx, live) }},
	} {
		unblock := block(c, call.rec.Resource)
		ctx, cancel := context.WithTimeout(c.ctx, patience)
		err := call.do(ctx) // the watchdog knows if this does not return
		cancel()
		unblock()
		if !errors.Is(err, context.DeadlineExceeded) {
			c.Errorf("%s that waits, with %v of time: %v, want %q", call.verb, patience, errorText(err), context.DeadlineExceeded)
		}
	}
	if rec, err := c.Get(c.ctx, dead.Resource); err == nil && rec.Owner != "owner-2" || err != nil && !errors.Is(err, locker.ErrNotHeld) {
		c.Errorf("after an acquire that was given up: %+v, %v", rec, err)
	}
	rec, err := c.Get(c.ctx, live.Resource)
	switch {
	case errors.Is(err, locker.ErrNotHeld), err == nil && rec.Token == live.Token:
	case err == nil && c.moving && rec.Owner == live.Owner && rec.Token > live.Token: // renewed all the same
	default:
		c.Errorf("after a renewal and a release that were given up: %+v, %v", rec, err)
	}
}
