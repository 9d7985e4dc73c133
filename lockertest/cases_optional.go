package lockertest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/locker-go/locker"
)

// byResource returns recs by their names. A record may be there twice.
func byResource(recs []locker.Record) map[string]locker.Record {
	m := make(map[string]locker.Record, len(recs))
	for _, r := range recs {
		m[r.Resource] = r
	}
	return m
}

func batch(c *check) {
	var recs []locker.Record
	for i := range 20 {
		recs = append(recs, c.acquire(c, c.name(fmt.Sprintf("%02d é🔒'\"\\%%", i)), fmt.Sprintf("owner-%d '\"\\🔒", i), c.long))
	}
	for _, ttl := range []time.Duration{c.longer, c.long, c.long} {
		renewed, err := c.Locker.(locker.BatchRenewer).RenewBatch(c.ctx, recs, ttl)
		if err != nil {
			c.Fatalf("RenewBatch: %v", err)
		}
		if len(renewed) != len(recs) {
			c.Errorf("%d of %d were renewed", len(renewed), len(recs))
		}
		got := byResource(renewed)
		for i, rec := range recs {
			r, ok := got[rec.Resource]
			if !ok {
				c.Errorf("%q was not renewed", rec.Resource)
				continue
			}
			c.record(r, rec.Resource, rec.Owner, ttl)
			c.renewal(r, rec, "renewal of %q", rec.Resource)
			if r.Remaining < ttl-c.long/2 {
				c.Errorf("%v remaining of %q, want %v", r.Remaining, r.Resource, ttl)
			}
			c.unchanged(c, r)
			if c.moving {
				recs[i] = r
			}
		}
	}
}

func batchLeftOut(c *check) {
	var recs, live []locker.Record
	for i := range 3 {
		rec := c.acquire(c, c.name(fmt.Sprintf("kept-%d", i)), "owner-1", c.long)
		recs, live = append(recs, rec), append(live, rec)
	}
	released := c.acquire(c, c.name("released"), "owner-1", c.long)
	c.release(c, released)
	expired := c.expired(c, c.name("expired"), "owner-1")
	stolen := c.expired(c, c.name("stolen"), "owner-1")
	others := []locker.Record{
		c.acquire(c, stolen.Resource, "owner-2", c.long),
		c.acquire(c, c.name("another's"), "owner-2", c.long),
	}
	another := others[1]
	another.Owner = "owner-1"
	never := locker.Record{Resource: c.name("never"), Owner: "owner-1", Token: 1}
	recs = append(recs, released, expired, stolen, another, never)
	if !c.moving {
		recs = append(recs, c.acquire(c, c.name("again"), "owner-1", c.long))
		others = append(others, c.acquire(c, c.name("again"), "owner-1", c.long))
	}

	renewed, err := c.Locker.(locker.BatchRenewer).RenewBatch(c.ctx, recs, c.longer)
	if err != nil {
		c.Fatalf("RenewBatch: %v", err)
	}
	got := byResource(renewed)
	for _, rec := range live {
		if r, ok := got[rec.Resource]; ok {
			c.unchanged(c, r)
		} else {
			c.Errorf("%q was not renewed beside those that are lost", rec.Resource)
		}
		delete(got, rec.Resource)
	}
	for _, r := range got {
		c.Errorf("%q of %q, token %d, was renewed", r.Resource, r.Owner, r.Token)
	}
	for _, rec := range others {
		c.unchanged(c, rec)
	}
	for _, resource := range []string{released.Resource, expired.Resource, never.Resource} {
		c.free(c, resource)
	}
}

func batchDuplicates(c *check) {
	one := c.acquire(c, c.name("one"), "owner-1", c.long)
	older := c.acquire(c, c.name("two"), "owner-1", c.long)
	two := c.acquire(c, c.name("two"), "owner-1", c.long)
	three := c.acquire(c, c.name("three"), "owner-1", c.long)
	sends := 1
	if c.moving {
		sends = 2 // as if the first answer had been lost
	}
	for range sends {
		renewed, err := c.Locker.(locker.BatchRenewer).RenewBatch(c.ctx, []locker.Record{three, one, older, two, one, older, one}, c.longer)
		if err != nil {
			c.Fatalf("RenewBatch: %v", err)
		}
		got := byResource(renewed)
		for _, rec := range []locker.Record{one, two, three} {
			r, ok := got[rec.Resource]
			if !ok {
				c.Errorf("%q was not renewed", rec.Resource)
				continue
			}
			if !c.rightToken(r, rec) {
				c.Errorf("token %d of %q, want that of the live grant, %d", r.Token, r.Resource, rec.Token)
			}
			c.unchanged(c, r)
		}
	}
}

func batchRejected(c *check) {
	l := c.Locker.(locker.BatchRenewer)
	rec := c.acquire(c, c.name("a"), "owner-1", c.long)
	if renewed, err := l.RenewBatch(c.ctx, nil, c.long); err != nil || len(renewed) != 0 {
		c.Errorf("RenewBatch of nothing: %v, %v, want nothing", renewed, errorText(err))
	}
	for _, ctx := range []context.Context{c.ctx, cancelled(c.ctx)} {
		_, err := l.RenewBatch(ctx, []locker.Record{rec, {Resource: "", Owner: "owner-1", Token: 1}}, c.longer)
		c.invalid(err, "resource", "RenewBatch with an empty resource")
		_, err = l.RenewBatch(ctx, []locker.Record{rec, {Resource: "x", Owner: "", Token: 1}}, c.longer)
		c.invalid(err, "owner", "RenewBatch with an empty owner")
		_, err = l.RenewBatch(ctx, []locker.Record{rec, {Resource: "x", Owner: "owner-1", Token: -1}}, c.longer)
		c.invalid(err, "token", "RenewBatch with a negative token")
	}
	c.unchanged(c, rec)
	if _, err := l.RenewBatch(cancelled(c.ctx), []locker.Record{rec}, c.long); !errors.Is(err, context.Canceled) {
		c.Errorf("RenewBatch under a context that was cancelled: %v, want %q", errorText(err), context.Canceled)
	}
}

func batchLarge(c *check) {
	const workers = 8
	n := 2500
	if c.short {
		n = 1100
	}
	recs := make([]locker.Record, n)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := w; i < n; i += workers {
				rec, err := c.lockers[w%2].Acquire(c.ctx, c.name(fmt.Sprintf("%04d", i)), fmt.Sprintf("owner-%d", i), c.long)
				if err != nil {
					c.Errorf("Acquire: %v", err)
					return
				}
				recs[i] = rec
			}
		})
	}
	wg.Wait()
	if c.hasFailed() {
		return
	}
	lost := make(map[string]bool)
	for i := 7; i < n; i += 400 {
		c.release(c, recs[i])
		lost[recs[i].Resource] = true
	}
	rand.Shuffle(n, func(i, j int) { recs[i], recs[j] = recs[j], recs[i] })
	renewed, err := c.Locker.(locker.BatchRenewer).RenewBatch(c.ctx, recs, c.longer)
	if err != nil {
		c.Fatalf("RenewBatch of %d: %v", n, err)
	}
	got := byResource(renewed)
	for i, rec := range recs {
		r, ok := got[rec.Resource]
		switch {
		case ok == lost[rec.Resource]:
			c.Fatalf("renewed: %v, released: %v of %q", ok, lost[rec.Resource], rec.Resource)
		case ok && (!c.rightToken(r, rec) || r.Owner != rec.Owner || !r.ExpiresAt.After(rec.ExpiresAt) || r.Remaining > c.longer):
			c.Fatalf("renewed %+v to %+v", rec, r)
		case ok && i%100 == 0:
			c.unchanged(c, r)
		}
	}
}

func handover(c *check) {
	l := c.Locker.(locker.Handoverer)
	first := c.acquire(c, c.name("a"), "owner-1", c.long)
	second, err := l.Handover(c.ctx, first, "owner-2", c.longer)
	if err != nil {
		c.Fatalf("Handover: %v", err)
	}
	c.record(second, first.Resource, "owner-2", c.longer)
	if second.Token <= first.Token {
		c.Errorf("token %d after the hand-over is not higher than %d", second.Token, first.Token)
	}
	if second.AcquiredAt.UnixMicro() != second.Token || second.Remaining < c.longer-c.long/2 {
		c.Errorf("the record is %+v, want AcquiredAt %d µs and %v remaining", second, second.Token, c.longer)
	}
	c.unchanged(c, second)
	c.want(c.Release(c.ctx, first), locker.ErrNotOwner, "release of the grant that was handed over")
	_, err = c.Renew(c.ctx, first, c.long)
	c.want(err, locker.ErrNotOwner, "renewal of the grant that was handed over")
	_, err = l.Handover(c.ctx, first, "owner-3", c.long)
	c.want(err, locker.ErrNotOwner, "hand-over of the grant that was handed over")
	c.unchanged(c, second)

	third, err := l.Handover(c.ctx, second, "owner-2", c.long) // to itself: a new grant all the same
	if err != nil {
		c.Fatalf("Handover to the same owner: %v", err)
	}
	if third.Token <= second.Token {
		c.Errorf("token %d after the hand-over to the same owner is not higher than %d", third.Token, second.Token)
	}
	if !c.moving {
		_, err = c.Renew(c.ctx, second, c.long)
		c.want(err, locker.ErrNotOwner, "renewal of the older grant")
	}
	c.unchanged(c, third)
	c.release(c, c.renew(c, third, c.long))
	c.free(c, first.Resource)
}

func handoverRefused(c *check) {
	l := c.Locker.(locker.Handoverer)
	live, others := notOwners(c, c.name("a"))
	for _, o := range others {
		_, err := l.Handover(c.ctx, o.rec, "owner-9", c.longer)
		c.want(err, locker.ErrNotOwner, "hand-over by %s", o.by)
		c.unchanged(c, live)
	}
	for _, ctx := range []context.Context{c.ctx, cancelled(c.ctx)} {
		for _, name := range badNames {
			_, err := l.Handover(ctx, live, name, c.long)
			c.invalid(err, "owner", "hand-over to %.40q", name)
		}
	}
	if _, err := l.Handover(cancelled(c.ctx), live, "owner-9", c.long); !errors.Is(err, context.Canceled) {
		c.Errorf("hand-over under a context that was cancelled: %v, want %q", errorText(err), context.Canceled)
	}
	c.unchanged(c, live)
	c.release(c, live)
	dead := c.expired(c, c.name("expired"), "owner-1")
	for what, rec := range map[string]locker.Record{
		"what was released":       live,
		"what expired":            dead,
		"what was never acquired": {Resource: c.name("never"), Owner: "owner-1", Token: 1},
	} {
		_, err := l.Handover(c.ctx, rec, "owner-9", c.long)
		c.want(err, locker.ErrNotHeld, "hand-over of %s", what)
		c.free(c, rec.Resource)
	}
}

func handoverNoGap(c *check) {
	l := c.Locker.(locker.Handoverer)
	resource := c.name("a")
	rec := c.acquire(c, resource, "owner", c.long)
	done := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if _, err := c.lockers[w%2].Acquire(c.ctx, resource, "third", c.long); !errors.Is(err, locker.ErrHeld) {
					c.Errorf("acquire by a third during hand-overs: %v, want ErrHeld", errorText(err))
					return
				}
				time.Sleep(rand.N(time.Millisecond)) // some stores starve those who write while others read
			}
		})
	}
	for i := range c.rounds(200) {
		next, err := l.Handover(c.ctx, rec, fmt.Sprintf("owner-%d", i), c.long)
		if err != nil {
			c.Errorf("hand-over no. %d: %v", i, err)
			break
		}
		if next.Token <= rec.Token {
			c.Errorf("hand-over no. %d: token %d after %d", i, next.Token, rec.Token)
		}
		rec = next
	}
	close(done)
	wg.Wait()
}

func list(c *check) {
	l := c.Locker.(locker.Admin)
	// In the order of their bytes, which is not that of any language, of folded case, or of UTF-16.
	names := []string{" ", "%", "/", "0", "07", "10", "7", "A", "B", "_", "a", "a ", "a b", "b", "e\u0301", "z", "é", "ｅ", "🔒"}
	want := make(map[string]locker.Record)
	for _, i := range rand.Perm(len(names)) {
		rec := c.acquire(c, c.name(names[i]), fmt.Sprintf("owner-%d", i), c.long)
		want[rec.Resource] = rec
	}
	c.release(c, c.acquire(c, c.name("C released"), "owner", c.long))
	c.expired(c, c.name("D expired"), "owner")

	for _, limit := range []int{1, 2, 5, len(names), len(names) + 1, 1000} {
		var got []string
		after, past := c.prefix, false
		for !past {
			page, err := l.List(c.ctx, after, limit)
			if err != nil {
				c.Fatalf("List(%q, %d): %v", after, limit, err)
			}
			if len(page) > limit {
				c.Fatalf("List(%q, %d) returned %d locks", after, limit, len(page))
			}
			for _, rec := range page {
				if rec.Resource <= after {
					c.Fatalf("List(%q, %d): %q comes after %q", after, limit, rec.Resource, after)
				}
				after = rec.Resource
				if past = !strings.HasPrefix(rec.Resource, c.prefix); past {
					break // the store has other locks
				}
				got = append(got, strings.TrimPrefix(rec.Resource, c.prefix))
				w := want[rec.Resource]
				if rec.Owner != w.Owner || rec.Token != w.Token || !rec.AcquiredAt.Equal(w.AcquiredAt) || !rec.ExpiresAt.Equal(w.ExpiresAt) ||
					rec.Remaining <= 0 || rec.Remaining > c.long {
					c.Errorf("List(limit %d): %+v, want %+v", limit, rec, w)
				}
			}
			past = past || len(page) < limit
		}
		if !slices.Equal(got, names) {
			c.Errorf("pages of %d: %q, want %q", limit, got, names)
		}
	}
	if page, err := l.List(c.ctx, c.name("🔒"), 1000); err != nil {
		c.Errorf("List after the last: %v", err)
	} else if len(page) > 0 && strings.HasPrefix(page[0].Resource, c.prefix) {
		c.Errorf("List after the last: %+v", page[0])
	}
	if _, err := l.List(cancelled(c.ctx), "", 1); !errors.Is(err, context.Canceled) {
		c.Errorf("List under a context that was cancelled: %v, want %q", errorText(err), context.Canceled)
	}
}

func forceRelease(c *check) {
	l := c.Locker.(locker.Admin)
	resource := c.name("a")
	none := func(what string) {
		rec, err := l.ForceRelease(c.ctx, resource)
		c.want(err, locker.ErrNotHeld, "forced release of %s", what)
		if rec != (locker.Record{}) {
			c.Errorf("forced release of %s returned %+v", what, rec)
		}
		c.free(c, resource)
	}
	none("what was never acquired")
	rec := c.acquire(c, resource, "owner-1", c.long)
	evicted, err := l.ForceRelease(c.ctx, resource)
	if err != nil {
		c.Fatalf("ForceRelease: %v", err)
	}
	c.record(evicted, resource, "owner-1", c.long)
	if evicted.Token != rec.Token || !evicted.ExpiresAt.Equal(rec.ExpiresAt) {
		c.Errorf("evicted %+v, want %+v", evicted, rec)
	}
	c.free(c, resource)
	none("what was forced")
	_, err = c.Renew(c.ctx, rec, c.long)
	c.want(err, locker.ErrNotHeld, "renewal by the evicted holder")
	c.want(c.Release(c.ctx, rec), locker.ErrNotHeld, "release by the evicted holder")
	next := c.acquire(c, resource, "owner-2", c.long)
	if next.Token <= rec.Token {
		c.Errorf("token %d after the forced release is not higher than %d", next.Token, rec.Token)
	}
	_, err = c.Renew(c.ctx, rec, c.long)
	c.want(err, locker.ErrNotOwner, "renewal by the evicted holder when the next one is in")
	c.unchanged(c, next)
	if _, err := l.ForceRelease(cancelled(c.ctx), resource); !errors.Is(err, context.Canceled) {
		c.Errorf("ForceRelease under a context that was cancelled: %v, want %q", errorText(err), context.Canceled)
	}
	c.unchanged(c, next)
	c.release(c, next)
	c.expired(c, resource, "owner-3")
	none("what expired")
	for _, name := range badNames {
		_, err := l.ForceRelease(cancelled(c.ctx), name)
		c.invalid(err, "resource", "forced release of %.40q", name)
	}
}

func ping(c *check) {
	for i, l := range c.lockers {
		if err := l.(locker.Pinger).Ping(c.ctx); err != nil {
			c.Errorf("Ping of Locker %d: %v", i, err)
		}
		if err := l.(locker.Pinger).Ping(cancelled(c.ctx)); !errors.Is(err, context.Canceled) {
			c.Errorf("Ping under a context that was cancelled: %v, want %q", errorText(err), context.Canceled)
		}
	}
}

func waitFree(c *check) {
	wait := func(what string, held locker.Record, then func()) {
		begin := time.Now()
		ctx, cancel := context.WithTimeout(c.ctx, c.patience)
		defer cancel()
		result := make(chan error, 1)
		go func() { result <- c.lockers[1].(locker.Waiter).WaitFree(ctx, held) }()
		then()
		if err := <-result; err != nil {
			c.Errorf("WaitFree of %s: %v after %v, want nil", what, err, time.Since(begin))
		}
	}
	var rec locker.Record
	if c.can(lasting) {
		rec = c.acquire(c, c.name("released"), "owner-1", c.long)
		wait("what is released", rec, func() { c.release(c, rec) })
		wait("what was released", rec, func() {})
		rec = c.acquire(c, c.name("renewed"), "owner-1", c.long)
		wait("what is renewed and released", rec, func() { c.release(c, c.renew(c, rec, c.longer)) })
	}
	if c.can(ending) {
		rec = c.acquire(c, c.name("expires"), "owner-1", c.ttl(50*time.Millisecond))
		wait("what expires", rec, func() {})
	}
	c.acquire(c, rec.Resource, "owner-2", c.long)
	wait("what has another owner now", rec, func() {})
	if !c.can(lasting) {
		return
	}

	rec = c.acquire(c, c.name("held"), "owner-1", c.long)
	for begin := time.Now(); ; {
		ctx, cancel := context.WithTimeout(c.ctx, 10*time.Millisecond)
		err := c.lockers[1].(locker.Waiter).WaitFree(ctx, rec)
		cancel()
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			return
		case err != nil:
			c.Fatalf("WaitFree of what is held: %v, want %q", err, context.DeadlineExceeded)
		case time.Since(begin) > c.patience:
			c.Fatalf("WaitFree never waits for what is held") // it may return early, but what is it for
		}
	}
}

func purge(c *check) {
	l := c.Locker.(Purger)
	idle := long + c.fixed // an Expirer may move the time of a grant back by its ttl
	live := c.acquire(c, c.name("live"), "owner-1", c.long)
	var dead, released locker.Record
	for try := 0; ; try++ {
		dead = c.expired(c, c.name("expired"), "owner-1")
		released = c.acquire(c, c.name("released"), "owner-1", c.long)
		c.release(c, released)
		c.pastToken(c, released.Token)
		if _, err := l.Purge(c.ctx, idle); err != nil {
			c.Fatalf("Purge of what has been idle for %v: %v", idle, err)
		}
		c.unchanged(c, live)
		n, err := l.Purge(c.ctx, 0)
		if err != nil {
			c.Fatalf("Purge of what has been idle for 0: %v", err)
		}
		c.unchanged(c, live)
		if n >= 2 {
			break
		}
		if try == 20 { // not once, so it was not another Run on the same store that came between
			c.Fatalf("a purge of what has been idle for 0 returned %d, want 2 at least", n)
		}
	}
	c.free(c, released.Resource)
	c.free(c, dead.Resource)
	c.want(c.Release(c.ctx, released), locker.ErrNotHeld, "release of what was purged")
	_, err := c.Renew(c.ctx, dead, c.long)
	c.want(err, locker.ErrNotHeld, "renewal of what was purged")
	c.free(c, dead.Resource)
	for _, idle := range []time.Duration{-1, math.MaxInt64} {
		_, err := l.Purge(cancelled(c.ctx), idle)
		c.invalid(err, "idle", "Purge(%d)", idle)
	}
	if _, err := l.Purge(cancelled(c.ctx), 0); !errors.Is(err, context.Canceled) {
		c.Errorf("Purge under a context that was cancelled: %v, want %q", errorText(err), context.Canceled)
	}
	c.unchanged(c, live)
}
