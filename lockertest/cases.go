package lockertest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/locker-go/locker"
)

// long is a ttl that does not run out while a case runs.
const long = 10 * time.Minute

// allCases are the properties, in the order in which they run: what others build on comes first.
func allCases() []testCase {
	return []testCase{
		{
			name: "acquire-free", run: acquireFree, leases: lasting,
			rule: `A free resource is granted to whoever asks, and Get then says who holds it.`,
		},
		{
			name: "acquire-held", run: acquireHeld, leases: lasting,
			rule: `A resource that another owner holds is refused with a *HeldError that says who holds it and for how long. A refusal
				changes nothing: neither who holds the lock, nor its token, nor how long it lasts.`,
		},
		{
			name: "acquire-again", run: acquireAgain, leases: lasting,
			rule: `The same owner is granted again at once: a new grant with a higher token and a full ttl. The older grant is dead,
				so that of two workers who share an owner by mistake the first one learns of it.`,
		},
		{
			name: "acquire-expired", run: acquireExpired, leases: lasting, dead: true,
			rule: `A holder that died blocks nobody for longer than its ttl: then the next owner is granted, with a higher token.`,
		},
		{
			name: "acquire-released", run: acquireReleased, leases: lasting,
			rule: `A release frees the resource at once, whatever was left of the ttl, and the next grant has a higher token.`,
		},
		{
			name: "release-not-owner", run: releaseNotOwner, leases: lasting,
			rule: `Only the very grant that a record names is released. Another owner, an older grant of the same owner or a token
				that was never given out is ErrNotOwner, and nothing has changed: else a late worker would free the lock of the next.`,
		},
		{
			name: "release-not-held", run: releaseNotHeld, leases: lasting, dead: true,
			rule: `A release of what expired, was released already or was never acquired is ErrNotHeld and creates nothing.`,
		},
		{
			name: "renew-full-ttl", run: renewFullTTL, leases: lasting,
			rule: `A renewal gives a full ttl from now: no more than that, however much was left, and no less.`,
		},
		{
			name: "renew-keeps-token", run: renewKeepsToken, leases: lasting,
			rule: `A renewal is no new grant: owner, token and AcquiredAt stay, so that what was written under the token stays valid.
				(With MovingToken: the owner stays, and the token rises with each renewal, AcquiredAt with it.)`,
		},
		{
			name: "renew-shortens", run: renewShortens, leases: varying,
			rule: `A renewal with a shorter ttl shortens the lease, which is how a lock is left to run out at a chosen time.`,
		},
		{
			name: "renew-same-instant", run: renewSameInstant, leases: lasting,
			rule: `Renewals that fall into the same instant all succeed, even those that change nothing in the store.`,
		},
		{
			name: "renew-not-owner", run: renewNotOwner, leases: lasting,
			rule: `Only the very grant that a record names is renewed. Another owner, an older grant of the same owner or a token that
				was never given out is ErrNotOwner, and nothing has changed.`,
		},
		{
			name: "renew-not-held", run: renewNotHeld, leases: lasting, dead: true,
			rule: `A renewal never re-creates: what expired, was released or was never acquired is ErrNotHeld and stays free.
				Else a holder that had lost its lock could take it back between two others and not know it.`,
		},
		{
			name: "renew-or-claim", run: renewOrClaim, heavy: true, leases: ending,
			rule: `At the moment a lease ends either its holder's renewal or another's claim succeeds, never both.`,
		},
		{
			name: "renew-or-release", run: renewOrRelease, heavy: true, leases: lasting,
			rule: `A renewal that meets the release of its own grant does not bring the lock back.`,
		},
		{
			name: "get", run: get, leases: lasting, dead: true,
			rule: `Get reads a live lock and changes nothing. Free, expired and never seen are all ErrNotHeld.`,
		},
		{
			name: "record-times", run: recordTimes, leases: lasting,
			rule: `AcquiredAt is the token as a time, in microseconds; AcquiredAt and ExpiresAt are UTC, and what the verbs return is
				what Get reads.`,
		},
		{
			name: "record-remaining", run: recordRemaining, leases: lasting,
			rule: `Remaining is what the holder counts down with its own clock, so it is never more than what the lease really had
				left when the call returned, nor more than the ttl.`,
		},
		{
			name: "record-rebuilt", run: recordRebuilt, leases: lasting, dead: true,
			rule: `Records are values: resource, owner and token alone name a grant, on any host and through any Locker on the same
				store, and the times in a record decide nothing.`,
		},
		{
			name: "errors", run: errorMessages, leases: lasting,
			rule: `errors.Is and errors.As work through whatever wraps a verdict, and the message names the resource.`,
		},
		{
			name: "token-zero", run: tokenZero, leases: lasting,
			rule: `Token 0 means any grant of this owner, or is refused as invalid. It never means anybody's.`,
		},
		{
			name: "tokens-rise", run: tokensRise, heavy: true, leases: lasting, dead: true,
			rule: `The token of every grant is higher than those of all grants of the resource before it, over releases, expiry,
				forced releases, hand-overs, purges and rows that were deleted: a store downstream rejects stale writers by it.`,
		},
		{
			name: "ttl-lasts", run: ttlLasts, leases: ending,
			rule: `A lease lasts for its ttl, not less: until then others are refused. Then it is free, however often others have asked.`,
		},
		{
			name: "ttl-accepted", run: ttlAccepted, leases: lasting | varying,
			rule: `Every ttl from 1 ms to 10 years is taken as it is, to the millisecond; a part of a millisecond rounds up.`,
		},
		{
			name: "ttl-rejected", run: ttlRejected, leases: lasting,
			rule: `A ttl that is 0, negative or above 10 years is an *InvalidError, and nothing is sent.`,
		},
		{
			name: "names-resource", run: namesResource, heavy: true, leases: lasting,
			rule: `Resources are compared byte for byte: whatever differs in case, accents, spaces or any other byte is another lock,
				and Get returns the name as it was given.`,
		},
		{
			name: "names-owner", run: namesOwner, heavy: true, leases: lasting,
			rule: `Owners are compared byte for byte, and returned as they were given.`,
		},
		{
			name: "names-bare", run: namesBare, heavy: true, leases: lasting,
			rule: `Names that mean something elsewhere (to a path, a pattern, a number, a driver) are names like all others here.`,
		},
		{
			name: "names-rejected", run: namesRejected, leases: lasting,
			rule: `A resource or owner that is empty, longer than 255 bytes, not valid UTF-8 or contains NUL is an *InvalidError from
				every verb, and nothing is sent.`,
		},
		{
			name: "context-cancelled", run: contextCancelled, leases: lasting, dead: true,
			rule: `A call whose context has been cancelled returns context.Canceled, which is no verdict, and grants nothing.`,
		},
		{
			name: "context-expired", run: contextExpired, leases: lasting, dead: true,
			rule: `A call whose deadline has passed returns context.DeadlineExceeded, which is no verdict, and grants nothing.`,
		},
		{
			name: "context-tight", run: contextTight, heavy: true, leases: lasting,
			rule: `A deadline in the middle of an acquire leaves the outcome unknown, never wrong: the lock is the owner's or free,
				and the same owner may send it again.`,
		},
		{
			name: "one-winner", run: oneWinner, heavy: true, leases: lasting,
			rule: `Of all those who ask for a free resource at the same time one is granted, and the others are told of that one.`,
		},
		{
			name: "one-winner-expired", run: oneWinnerExpired, heavy: true, leases: lasting, dead: true,
			rule: `Of all those who ask for an expired lock at the same time one is granted, and the others are told of that one.`,
		},
		{
			name: "counter", run: counter, heavy: true, leases: lasting,
			rule: `Nobody is inside while another is: a counter that only the lock protects loses no increment, and whoever comes
				later has the higher token.`,
		},
		{
			name: "no-overlap", run: noOverlap, heavy: true, leases: ending,
			rule: `At any instant of the store's clock a resource has one owner at most: where leases run out under contention, each
				grant begins when the lease before it has ended, or later.`,
		},
		{
			name: "two-lockers", run: twoLockers, leases: lasting,
			rule: `Two Lockers on the same store, each with a pool of its own, exclude one another and see the same lock.`,
		},
		{
			name: "batch", run: batch, needs: has[locker.BatchRenewer], leases: lasting,
			rule: `RenewBatch renews as Renew does: a full ttl, the same owner, token and AcquiredAt. (With MovingToken: a higher token,
				AcquiredAt with it.)`,
		},
		{
			name: "batch-left-out", run: batchLeftOut, needs: has[locker.BatchRenewer], leases: lasting, dead: true,
			rule: `RenewBatch leaves out, without an error, what it did not renew: what is lost, stolen, another's or unknown. None of
				these is changed.`,
		},
		{
			name: "batch-duplicates", run: batchDuplicates, needs: has[locker.BatchRenewer], leases: lasting,
			rule: `A record that is twice in the list, or beside an older grant of its resource, does not break the batch.`,
		},
		{
			name: "batch-rejected", run: batchRejected, needs: has[locker.BatchRenewer], leases: lasting,
			rule: `An invalid ttl or record in a batch is an *InvalidError, and nothing is sent. An empty list is no error.`,
		},
		{
			name: "handover", run: handover, needs: has[locker.Handoverer], leases: lasting,
			rule: `A hand-over ends one grant and makes the next one: new owner, higher token, full ttl, and the old grant is dead.`,
		},
		{
			name: "handover-refused", run: handoverRefused, needs: has[locker.Handoverer], leases: lasting, dead: true,
			rule: `Only the very grant that a record names is handed over: ErrNotOwner or ErrNotHeld otherwise, and nothing has
				changed.`,
		},
		{
			name: "handover-no-gap", run: handoverNoGap, needs: has[locker.Handoverer], heavy: true, leases: lasting,
			rule: `The lock goes to the next owner at the same instant: it is never free in between, and a third cannot get in.`,
		},
		{
			name: "list", run: list, needs: has[locker.Admin], leases: lasting, dead: true,
			rule: `List pages through the live locks by the bytes of their names, none twice and none left out, without those that
				expired or were released. A page with fewer than limit locks is the last one.`,
		},
		{
			name: "force-release", run: forceRelease, needs: has[locker.Admin], leases: lasting, dead: true,
			rule: `A forced release frees the resource whoever holds it and returns whom it evicted; nobody there is ErrNotHeld. The
				evicted holder's renewal is ErrNotHeld, or ErrNotOwner once the next one is in.`,
		},
		{
			name: "ping", run: ping, needs: has[locker.Pinger], leases: lasting,
			rule: `Ping returns nil when locks can be read, and ctx's error when ctx has ended.`,
		},
		{
			name: "wait-free", run: waitFree, needs: has[locker.Waiter], leases: lasting | ending,
			rule: `WaitFree returns nil when the lock has been released, has expired or is free already, so that no waiter sleeps
				beside a free lock; and ctx's error when ctx ends.`,
		},
		{
			name: "purge", run: purge, needs: has[Purger], leases: lasting, dead: true,
			rule: `A purge takes what is free and has been idle, and nothing that is held or that is not idle for long enough.`,
		},
		{
			name: "blocked-renew", run: blockedRenew, needs: has[Blocker], leases: ending | varying,
			rule: `A renewal that had to wait in the store gives a full ttl or none: a lease that was counted from before the wait
				would be over while its holder believes in it.`,
		},
		{
			name: "blocked-acquire", run: blockedAcquire, needs: has[Blocker], leases: ending | varying,
			rule: `A claim that had to wait in the store gives a full ttl: a lease that was counted from before the wait would be
				over while its holder believes in it.`,
		},
		{
			name: "blocked-context", run: blockedContext, needs: has[Blocker], leases: lasting, dead: true,
			rule: `The context bounds a call that waits in the store; what it says is ctx's error, and the lock is as it was, or as
				the call would have left it.`,
		},
		{
			name: "batch-large", run: batchLarge, needs: has[locker.BatchRenewer], heavy: true, leases: lasting,
			rule: `A batch may have any number of records: thousands are renewed, and the few that are lost are left out.`,
		},
	}
}

func acquireFree(c *check) {
	resource := c.name("a")
	c.free(c, resource)
	rec := c.acquire(c, resource, "owner-1", c.long)
	if rec.Remaining <= 0 {
		c.Errorf("%v remaining of a lease of %v", rec.Remaining, c.long)
	}
	c.unchanged(c, rec)
	c.free(c, c.name("b"))
	c.acquire(c, c.name("b"), "owner-1", c.long) // an owner may hold many
	c.unchanged(c, rec)
}

func acquireHeld(c *check) {
	resource := c.name("a")
	c.acquire(c, resource, "owner-1", c.long)
	before := c.get(c, resource)
	for i := range 10 {
		rec, err := c.Acquire(c.ctx, resource, "owner-2", c.longer)
		held := c.held(err, before, "acquire no. %d of a held resource", i)
		if rec != (locker.Record{}) {
			c.Errorf("a refused acquire returned the record %+v, want none", rec)
		}
		if h := held.Holder; h.Remaining <= 0 || h.Remaining > c.long {
			c.Errorf("the holder has %v left according to the refusal, want more than 0 and at most %v", h.Remaining, c.long)
		}
		c.unchanged(c, before)
	}
	// Refused, one may not act on it either.
	c.want(c.Release(c.ctx, locker.Record{Resource: resource, Owner: "owner-2", Token: before.Token}), locker.ErrNotOwner, "release by who was refused")
	c.unchanged(c, before)
	c.release(c, before)
	c.acquire(c, resource, "owner-2", c.long)
}

func acquireAgain(c *check) {
	resource := c.name("a")
	first := c.acquire(c, resource, "owner-1", c.long)
	second := c.acquire(c, resource, "owner-1", c.longer)
	if second.Token <= first.Token {
		c.Errorf("token %d of the second grant is not higher than %d of the first", second.Token, first.Token)
	}
	if second.Remaining < c.longer-c.long/2 {
		c.Errorf("%v remaining of the second grant, want the ttl of %v", second.Remaining, c.longer)
	}
	if !c.moving {
		c.want(c.Release(c.ctx, first), locker.ErrNotOwner, "release of the first grant")
		_, err := c.Renew(c.ctx, first, c.long)
		c.want(err, locker.ErrNotOwner, "renewal of the first grant")
	}
	c.unchanged(c, second)
	third := c.acquire(c, resource, "owner-1", c.shorter) // a new grant has its own ttl, a shorter one too
	c.unchanged(c, third)
	if third.Token <= second.Token {
		c.Errorf("token %d of the third grant is not higher than %d of the second", third.Token, second.Token)
	}
	c.release(c, third)
	c.free(c, resource)
}

func acquireExpired(c *check) {
	resource := c.name("a")
	first := c.expired(c, resource, "owner-1")
	second := c.acquire(c, resource, "owner-2", c.long)
	if second.Token <= first.Token {
		c.Errorf("token %d is not higher than that of the expired grant, %d", second.Token, first.Token)
	}
	c.unchanged(c, second)
	_, err := c.Acquire(c.ctx, resource, "owner-1", c.long)
	c.held(err, second, "acquire by the owner that let it expire")
	c.want(c.Release(c.ctx, first), locker.ErrNotOwner, "release by the owner that let it expire")
	c.unchanged(c, second)
	// The same owner may come back too.
	c.expired(c, c.name("b"), "owner-1")
	c.acquire(c, c.name("b"), "owner-1", c.long)
}

func acquireReleased(c *check) {
	resource := c.name("a")
	first := c.acquire(c, resource, "owner-1", c.long)
	c.release(c, first)
	c.free(c, resource)
	second := c.acquire(c, resource, "owner-2", c.long)
	c.release(c, second)
	third := c.acquire(c, resource, "owner-2", c.long)
	if first.Token >= second.Token || second.Token >= third.Token {
		c.Errorf("tokens %d, %d and %d do not rise", first.Token, second.Token, third.Token)
	}
	c.unchanged(c, third)
}

// claim is a record that does not name the live grant, and why.
type claim struct {
	by  string
	rec locker.Record
}

// notOwners makes resource held and returns the lock, and records of older, of other and of no grants.
func notOwners(c *check, resource string) (live locker.Record, others []claim) {
	first := c.acquire(c, resource, "owner-1", c.long)
	c.release(c, first)
	older := c.acquire(c, resource, "owner-2", c.long)
	c.acquire(c, resource, "owner-2", c.long)
	live = c.get(c, resource)
	grant := func(owner string, token int64) locker.Record {
		return locker.Record{Resource: resource, Owner: owner, Token: token, ExpiresAt: live.ExpiresAt, Remaining: live.Remaining}
	}
	others = []claim{
		{"another owner", grant("owner-3", live.Token)},
		{"another owner, with token 1", grant("owner-3", 1)},
		{"the owner before", first},
		{"the owner before, with the live token", grant("owner-1", live.Token)},
		{"the owner with a token that is too high by 1", grant("owner-2", live.Token+1)},
		{"the owner with the highest token there can be", grant("owner-2", math.MaxInt64)},
		{"the owner's name in another case", grant("Owner-2", live.Token)},
		{"the owner's name and a space", grant("owner-2 ", live.Token)},
	}
	if !c.moving {
		others = append(others,
			claim{"an older grant of the same owner", older},
			claim{"the owner with a token that is too low by 1", grant("owner-2", live.Token-1)})
	}
	return live, others
}

func releaseNotOwner(c *check) {
	live, others := notOwners(c, c.name("a"))
	for _, o := range others {
		c.want(c.Release(c.ctx, o.rec), locker.ErrNotOwner, "release by %s", o.by)
		c.unchanged(c, live)
	}
	c.release(c, live)
}

func releaseNotHeld(c *check) {
	resource := c.name("never")
	never := locker.Record{Resource: resource, Owner: "owner-1", Token: 1}
	c.want(c.Release(c.ctx, never), locker.ErrNotHeld, "release of what was never acquired")
	c.free(c, resource)

	rec := c.acquire(c, c.name("twice"), "owner-1", c.long)
	c.release(c, rec)
	for range 2 {
		c.want(c.Release(c.ctx, rec), locker.ErrNotHeld, "release of what was released")
	}
	rec.Owner = "owner-2"
	c.want(c.Release(c.ctx, rec), locker.ErrNotHeld, "release by another of what was released")
	c.free(c, rec.Resource)

	rec = c.expired(c, c.name("expired"), "owner-1")
	c.want(c.Release(c.ctx, rec), locker.ErrNotHeld, "release of what expired")
	c.free(c, rec.Resource)
	if next := c.acquire(c, rec.Resource, "owner-2", c.long); next.Token <= rec.Token {
		c.Errorf("token %d after the late release is not higher than %d", next.Token, rec.Token)
	}
}

func renewFullTTL(c *check) {
	first := c.acquire(c, c.name("a"), "owner-1", c.long)
	// Each renewal is later than the one before, so with the same ttl its end is, too.
	second := c.renew(c, first, c.longer)
	if gain := second.ExpiresAt.Sub(first.ExpiresAt); gain < c.longer-c.long {
		c.Errorf("a renewal from %v to %v moved the end by %v, want at least %v", c.long, c.longer, gain, c.longer-c.long)
	}
	for begin := time.Now(); second.ExpiresAt.Equal(first.ExpiresAt); second = c.renew(c, first, c.longer) { // a clock may be coarse
		if time.Since(begin) > c.patience {
			c.Fatalf("renewals have not moved the end for %v", c.patience)
		}
	}
	c.unchanged(c, second)
	last := second
	for range 5 {
		rec := c.renew(c, last, c.longer)
		if rec.ExpiresAt.Before(last.ExpiresAt) {
			c.Errorf("a renewal with the same ttl moved the end from %v to %v", last.ExpiresAt, rec.ExpiresAt)
		}
		if got := c.get(c, rec.Resource); got.Remaining > c.longer {
			c.Errorf("after a renewal for %v the lease has %v left", c.longer, got.Remaining)
		}
		c.unchanged(c, rec)
		last = rec
	}
	if c.moving {
		first = last
	}
	c.release(c, first) // its names and token are still those of the grant
	c.free(c, first.Resource)
}

func renewKeepsToken(c *check) {
	rec := c.acquire(c, c.name("a"), "owner-1", c.long)
	for i := range 5 {
		renewed := c.renew(c, rec, c.long)
		c.renewal(renewed, rec, "renewal no. %d", i)
		c.unchanged(c, renewed)
		if c.moving {
			rec = renewed
		}
	}
	c.release(c, rec)
}

func renewShortens(c *check) {
	rec := c.acquire(c, c.name("a"), "owner-1", c.long)
	short := c.renew(c, rec, c.shorter)
	if !short.ExpiresAt.Before(rec.ExpiresAt) {
		c.Errorf("a renewal from %v to %v left the end at %v (before: %v)", c.long, c.shorter, short.ExpiresAt, rec.ExpiresAt)
	}
	c.unchanged(c, short)
	c.cut(c, short)
	c.acquire(c, rec.Resource, "owner-2", c.long)
}

func renewSameInstant(c *check) {
	rec := c.acquire(c, c.name("a"), "owner-1", c.long)
	for range 10 {
		c.renew(c, rec, c.long)
	}
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			renewed, err := c.lockers[i%2].Renew(c.ctx, rec, c.long)
			if err != nil {
				c.Errorf("renewal no. %d of ten at the same time: %v", i, err)
			} else if renewed.Owner != rec.Owner || renewed.Resource != rec.Resource {
				c.Errorf("renewal no. %d of ten at the same time is of %q and %q", i, renewed.Resource, renewed.Owner)
			}
		})
	}
	wg.Wait()
	c.release(c, c.get(c, rec.Resource))
}

func renewNotOwner(c *check) {
	live, others := notOwners(c, c.name("a"))
	for _, o := range others {
		_, err := c.Renew(c.ctx, o.rec, c.longer)
		c.want(err, locker.ErrNotOwner, "renewal by %s", o.by)
		c.unchanged(c, live)
	}
	c.renew(c, live, c.long)
}

func renewNotHeld(c *check) {
	resource := c.name("never")
	_, err := c.Renew(c.ctx, locker.Record{Resource: resource, Owner: "owner-1", Token: 1}, c.long)
	c.want(err, locker.ErrNotHeld, "renewal of what was never acquired")
	c.free(c, resource)

	rec := c.acquire(c, c.name("released"), "owner-1", c.long)
	c.release(c, rec)
	for range 2 {
		_, err = c.Renew(c.ctx, rec, c.long)
		c.want(err, locker.ErrNotHeld, "renewal of what was released")
		c.free(c, rec.Resource)
	}
	rec.Owner = "owner-2"
	_, err = c.Renew(c.ctx, rec, c.long)
	c.want(err, locker.ErrNotHeld, "renewal by another of what was released")
	c.free(c, rec.Resource)

	rec = c.expired(c, c.name("expired"), "owner-1")
	for range 2 {
		_, err = c.Renew(c.ctx, rec, c.long)
		c.want(err, locker.ErrNotHeld, "renewal of what expired")
		c.free(c, rec.Resource)
	}
	c.acquire(c, rec.Resource, "owner-2", c.long)
}

func renewOrClaim(c *check) {
	rounds := c.rounds(300)
	if c.fixed != 0 {
		rounds = min(rounds, 60) // each takes as long as a lease, or two
	}
	for i := range rounds {
		resource := c.name(fmt.Sprint(i))
		rec, err := c.Acquire(c.ctx, resource, "holder", c.ttl(time.Duration(1+i%4)*time.Millisecond))
		if err != nil {
			c.Fatalf("Acquire: %v", err)
		}
		var again, next locker.Record
		var renewed, claimed error
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(rec.Remaining - rand.N(min(rec.Remaining, 8*time.Millisecond)+1)) // up to the very end
			again, renewed = c.lockers[0].Renew(c.ctx, rec, c.long)
		})
		wg.Go(func() {
			time.Sleep(rec.Remaining - time.Millisecond)
			for {
				next, claimed = c.lockers[1].Acquire(c.ctx, resource, "claimer", c.long)
				var held *locker.HeldError
				if !errors.As(claimed, &held) || held.Holder.Remaining > time.Minute { // renewed: it will not end
					return
				}
				time.Sleep(held.Holder.Remaining - time.Millisecond)
			}
		})
		wg.Wait()
		if renewed == nil {
			rec = again
		}
		holder, err := c.Get(c.ctx, resource)
		switch {
		case renewed != nil && !errors.Is(renewed, locker.ErrNotHeld) && !errors.Is(renewed, locker.ErrNotOwner):
			c.Fatalf("round %d: Renew: %v", i, renewed)
		case claimed != nil && !errors.Is(claimed, locker.ErrHeld):
			c.Fatalf("round %d: Acquire: %v", i, claimed)
		case c.fixed != 0: // a renewed lease ends too, so that the claim came in any case
			if next.AcquiredAt.Before(rec.ExpiresAt) {
				c.Fatalf("round %d: the claim began %v before the lease ended (renewal: %v)", i, rec.ExpiresAt.Sub(next.AcquiredAt), renewed)
			}
		case renewed == nil && claimed == nil:
			c.Fatalf("round %d: both succeeded, the renewal and the claim; now %q holds the lock", i, holder.Owner)
		case err != nil:
			c.Fatalf("round %d: Get: %v, want a lock (renewal: %v, claim: %v)", i, err, renewed, claimed)
		case (renewed == nil) != (holder.Owner == "holder"):
			c.Fatalf("round %d: %q holds the lock (renewal: %v, claim: %v)", i, holder.Owner, renewed, claimed)
		}
	}
}

func renewOrRelease(c *check) {
	resource := c.name("a")
	for i := range c.rounds(200) {
		rec := c.acquire(c, resource, fmt.Sprintf("owner-%d", i), c.long)
		var renewed, released error
		var wg sync.WaitGroup
		wg.Go(func() { _, renewed = c.lockers[0].Renew(c.ctx, rec, c.long) })
		wg.Go(func() {
			if i%2 == 0 {
				time.Sleep(rand.N(time.Millisecond)) // which of them comes first is not to be settled by the scheduler
			}
			released = c.lockers[1].Release(c.ctx, rec)
		})
		wg.Wait()
		if renewed != nil && !errors.Is(renewed, locker.ErrNotHeld) {
			c.Fatalf("round %d: Renew: %v, want none or ErrNotHeld", i, renewed)
		}
		if released != nil {
			c.Fatalf("round %d: Release: %v", i, released)
		}
		if c.free(c, resource); c.hasFailed() {
			return
		}
	}
}

func get(c *check) {
	resource := c.name("a")
	c.free(c, resource)
	rec := c.acquire(c, resource, "owner-1", c.long)
	for _, l := range c.lockers {
		got := c.get(l, resource)
		c.record(got, resource, "owner-1", c.long)
		if got.Token != rec.Token {
			c.Errorf("Get returned token %d, want that of the grant, %d", got.Token, rec.Token)
		}
		c.unchanged(c, rec)
	}
	c.release(c, rec)
	c.free(c, resource)
	c.expired(c, resource, "owner-2")
	c.free(c, resource)
	// What Get did not find is still to be had.
	c.acquire(c, resource, "owner-3", c.long)
}

func recordTimes(c *check) {
	times := func(verb string, rec locker.Record, ttl time.Duration) {
		if rec.AcquiredAt.UnixMicro() != rec.Token || rec.AcquiredAt.Nanosecond()%1000 != 0 {
			c.Errorf("%s: AcquiredAt %v is %d µs, want the token, %d", verb, rec.AcquiredAt, rec.AcquiredAt.UnixMicro(), rec.Token)
		}
		if rec.AcquiredAt.Location() != time.UTC || rec.ExpiresAt.Location() != time.UTC {
			c.Errorf("%s: AcquiredAt %v and ExpiresAt %v are not UTC", verb, rec.AcquiredAt, rec.ExpiresAt)
		}
		if lasts := rec.ExpiresAt.Sub(rec.AcquiredAt); lasts < ttl {
			c.Errorf("%s: ExpiresAt is %v after AcquiredAt, want the ttl of %v or more", verb, lasts, ttl)
		}
		if rec.IsExpired(rec.AcquiredAt) || !rec.IsExpired(rec.ExpiresAt) {
			c.Errorf("%s: IsExpired is not false at AcquiredAt and true at ExpiresAt", verb)
		}
	}
	rec := c.acquire(c, c.name("a"), "owner-1", c.long)
	times("Acquire", rec, c.long)
	times("Get", c.get(c, rec.Resource), c.long)
	rec = c.renew(c, rec, c.long)
	times("Renew", rec, c.long)
	times("Get", c.get(c, rec.Resource), c.long)
	again := c.acquire(c, c.name("a"), "owner-1", c.long)
	times("Acquire again", again, c.long)
	c.unchanged(c, again)
}

func recordRemaining(c *check) {
	ttl := c.ttl(time.Minute)
	var rec locker.Record
	for i := range 20 {
		var err error
		if i%2 == 0 {
			rec, err = c.Acquire(c.ctx, c.name("a"), "owner-1", ttl)
		} else {
			rec, err = c.Renew(c.ctx, rec, ttl)
		}
		returned := time.Now()
		if err != nil {
			c.Fatalf("call no. %d: %v", i, err)
		}
		if rec.Remaining <= 0 || rec.Remaining > ttl {
			c.Errorf("call no. %d: %v remaining, want more than 0 and at most %v", i, rec.Remaining, ttl)
		}
		asked := time.Now()
		var left time.Duration
		if i%3 == 0 {
			_, err := c.Acquire(c.ctx, c.name("a"), "owner-2", ttl)
			left = c.held(err, rec, "acquire of a held resource").Holder.Remaining
		} else {
			left = c.get(c, rec.Resource).Remaining
		}
		told := time.Now()
		// At told the lease had at least left, and at most that and the time it took to ask.
		if counted := rec.Remaining - told.Sub(returned); counted > left+told.Sub(asked)+clockSlack {
			c.Errorf("call no. %d: a holder that counts down from %v believes in %v, but the lease has at most %v left",
				i, rec.Remaining, counted, left+told.Sub(asked))
		}
		// And it began before the call returned.
		if most := ttl - told.Sub(returned); left > most+clockSlack {
			c.Errorf("call no. %d: %v after a lease of %v was given it is said to have %v left, want %v at most", i, told.Sub(returned), ttl, left, most)
		}
	}
}

func recordRebuilt(c *check) {
	resource := c.name("a")
	rec := c.acquire(c, resource, "owner-1", c.long)
	handle := locker.Record{Resource: resource, Owner: "owner-1", Token: rec.Token}
	renewed := c.renew(c.lockers[1], handle, c.long)
	c.unchanged(c, renewed)

	handle = locker.Record{
		Resource: resource, Owner: "owner-1", Token: renewed.Token,
		AcquiredAt: time.Unix(1, 0), ExpiresAt: time.Unix(2, 0), Remaining: -1,
	}
	renewed = c.renew(c.lockers[1], handle, c.long)
	if renewed.Remaining < c.long/2 {
		c.Errorf("%v remaining after a renewal for %v through a record whose times are wrong", renewed.Remaining, c.long)
	}
	c.release(c.lockers[1], locker.Record{Resource: resource, Owner: "owner-1", Token: renewed.Token})
	c.free(c, resource)

	// And one that claims to be live for ever is not.
	dead := c.expired(c, resource, "owner-2")
	dead.ExpiresAt, dead.Remaining = dead.ExpiresAt.AddDate(100, 0, 0), c.long
	_, err := c.Renew(c.ctx, dead, c.long)
	c.want(err, locker.ErrNotHeld, "renewal of an expired grant through a record whose times are wrong")
	c.want(c.Release(c.ctx, dead), locker.ErrNotHeld, "release of an expired grant through a record whose times are wrong")
}

func errorMessages(c *check) {
	resource := c.name("a")
	_, notHeld := c.Get(c.ctx, resource)
	rec := c.acquire(c, resource, "owner-1", c.long)
	_, held := c.Acquire(c.ctx, resource, "owner-2", c.long)
	other := rec
	other.Owner = "owner-2"
	_, notOwner := c.Renew(c.ctx, other, c.long)
	for _, e := range []struct{ err, verdict error }{
		{notHeld, locker.ErrNotHeld},
		{held, locker.ErrHeld},
		{notOwner, locker.ErrNotOwner},
		{c.Release(c.ctx, other), locker.ErrNotOwner},
	} {
		c.want(e.err, e.verdict, "the verdict")
		if e.err == nil {
			continue
		}
		c.want(fmt.Errorf("job: %w", e.err), e.verdict, "the wrapped verdict")
		if !strings.Contains(e.err.Error(), resource) {
			c.Errorf("the message %q does not name the resource, %q", e.err, resource)
		}
	}
	c.held(held, rec, "acquire of a held resource")
	if held != nil && !strings.Contains(held.Error(), "owner-1") {
		c.Errorf("the message %q does not name the holder", held)
	}
}

func tokenZero(c *check) {
	resource := c.name("a")
	c.acquire(c, resource, "owner-1", c.long)
	live := c.get(c, resource)
	grantOf := func(owner string) locker.Record { return locker.Record{Resource: resource, Owner: owner} }

	_, err := c.Renew(c.ctx, grantOf("owner-2"), c.longer)
	if !errors.Is(err, locker.ErrInvalid) {
		c.want(err, locker.ErrNotOwner, "renewal of token 0 by another owner")
	}
	c.unchanged(c, live)
	if err := c.Release(c.ctx, grantOf("owner-2")); !errors.Is(err, locker.ErrInvalid) {
		c.want(err, locker.ErrNotOwner, "release of token 0 by another owner")
	}
	c.unchanged(c, live)

	rec, err := c.Renew(c.ctx, grantOf("owner-1"), c.longer)
	switch {
	case errors.Is(err, locker.ErrInvalid):
		c.unchanged(c, live)
	case err != nil:
		c.Fatalf("renewal of token 0 by the owner: %v", err)
	default:
		c.record(rec, resource, "owner-1", c.longer)
		c.unchanged(c, rec) // with the token of the grant
		live = rec
	}
	switch err := c.Release(c.ctx, grantOf("owner-1")); {
	case errors.Is(err, locker.ErrInvalid):
		c.unchanged(c, live)
	case err != nil:
		c.Fatalf("release of token 0 by the owner: %v", err)
	default:
		c.free(c, resource)
		_, err := c.Renew(c.ctx, grantOf("owner-1"), c.long)
		c.want(err, locker.ErrNotHeld, "renewal of token 0 after the release")
		c.want(c.Release(c.ctx, grantOf("owner-1")), locker.ErrNotHeld, "release of token 0 after the release")
		c.free(c, resource)
	}
}

func tokensRise(c *check) {
	resource := c.name("a")
	// A way ends the last grant, which is live, and makes the next one.
	type way struct {
		name  string
		grant func(owner string, last locker.Record) locker.Record
	}
	acquire := func(owner string) locker.Record { return c.acquire(c, resource, owner, c.long) }
	ways := []way{
		{"release", func(owner string, last locker.Record) locker.Record {
			c.release(c, last)
			return acquire(owner)
		}},
		{"same owner", func(_ string, last locker.Record) locker.Record {
			return acquire(last.Owner)
		}},
		{"steal", func(owner string, last locker.Record) locker.Record {
			c.cut(c, last)
			return acquire(owner)
		}},
	}
	if l, ok := c.Locker.(Purger); ok {
		ways = append(ways, way{"release and purge", func(owner string, last locker.Record) locker.Record {
			c.release(c, last)
			if _, err := l.Purge(c.ctx, 0); err != nil {
				c.Fatalf("Purge: %v", err)
			}
			return acquire(owner)
		}})
	}
	if l, ok := c.Locker.(RowDeleter); ok {
		ways = append(ways, way{"deleted row", func(owner string, last locker.Record) locker.Record {
			c.pastToken(c, last.Token) // that is what the promise assumes
			if err := l.DeleteRow(c.ctx, resource); err != nil {
				c.Fatalf("DeleteRow: %v", err)
			}
			return acquire(owner)
		}})
	}
	if l, ok := c.Locker.(locker.Admin); ok {
		ways = append(ways, way{"forced release", func(owner string, _ locker.Record) locker.Record {
			if _, err := l.ForceRelease(c.ctx, resource); err != nil {
				c.Fatalf("ForceRelease: %v", err)
			}
			return acquire(owner)
		}})
	}
	if l, ok := c.Locker.(locker.Handoverer); ok {
		ways = append(ways, way{"hand-over", func(owner string, last locker.Record) locker.Record {
			rec, err := l.Handover(c.ctx, last, owner, c.long)
			if err != nil {
				c.Fatalf("Handover: %v", err)
			}
			return rec
		}})
	}
	last := acquire("owner")
	for i := range c.rounds(1000) {
		way := ways[i%len(ways)]
		rec := way.grant(fmt.Sprintf("owner-%d", i), last)
		if rec.Token <= last.Token {
			c.Fatalf("cycle %d (%s): token %d after %d", i, way.name, rec.Token, last.Token)
		}
		last = rec
	}
}

func ttlLasts(c *check) {
	ttl := c.ttl(200 * time.Millisecond)
	resource := c.name("a")
	begin := time.Now()
	rec := c.acquire(c, resource, "owner-1", ttl)
	for refused := 0; ; refused++ {
		_, err := c.Acquire(c.ctx, resource, "owner-2", ttl)
		lasted := time.Since(begin)
		if err != nil {
			c.held(err, rec, "acquire of a held resource")
			if lasted > c.patience {
				c.Fatalf("a lease of %v is still held after %v and %d refusals", ttl, lasted, refused)
			}
			time.Sleep(time.Millisecond)
			continue
		}
		if lasted < ttl-slack(ttl) {
			c.Errorf("a lease of %v was given to another after %v", ttl, lasted)
		}
		return
	}
}

func ttlAccepted(c *check) {
	type accepted struct{ given, want time.Duration }
	ttls := []accepted{
		{1, time.Millisecond},
		{999_999, time.Millisecond},
		{time.Millisecond, time.Millisecond},
		{time.Millisecond + 1, 2 * time.Millisecond},
		{1500 * time.Microsecond, 2 * time.Millisecond},
		{999 * time.Millisecond, 999 * time.Millisecond},
		{1500 * time.Millisecond, 1500 * time.Millisecond},
		{time.Hour + time.Millisecond, time.Hour + time.Millisecond},
		{365 * 24 * time.Hour, 365 * 24 * time.Hour},
		{locker.MaxTTL, locker.MaxTTL},
	}
	if !c.can(varying) {
		ttls = []accepted{{c.fixed, c.fixed}}
	}
	for i, ttl := range ttls {
		// A store may read its clock once for each of the two times, so the best of many tries is what counts.
		best, left := time.Duration(math.MaxInt64), time.Duration(0)
		for try := range 50 {
			rec := c.acquire(c, c.name(fmt.Sprintf("%d-%d", i, try)), "owner-1", ttl.given)
			lasts := rec.ExpiresAt.Sub(rec.AcquiredAt)
			if lasts < ttl.want {
				c.Fatalf("Acquire for %v: ExpiresAt is %v after AcquiredAt, want %v", ttl.given, lasts, ttl.want)
			}
			if rec.Remaining > ttl.want {
				c.Fatalf("Acquire for %v: %v remaining, want at most %v", ttl.given, rec.Remaining, ttl.want)
			}
			if best = min(best, lasts); best < ttl.want+time.Millisecond/2 {
				break
			}
		}
		if best >= ttl.want+time.Millisecond/2 {
			c.Errorf("Acquire for %v: ExpiresAt is %v after AcquiredAt at best, want %v", ttl.given, best, ttl.want)
		}
		for try := 0; try < 50 && left < ttl.want-ttl.want/10; try++ {
			rec := c.acquire(c, c.name(fmt.Sprintf("renew %d-%d", i, try)), "owner-1", c.long)
			if ttl.want < 100*time.Millisecond { // too little to tell from the time that a call takes
				c.cutTo(c, rec, ttl.given)
				break
			}
			rec = c.renew(c, rec, ttl.given)
			left = max(left, rec.Remaining)
		}
		if ttl.want >= 100*time.Millisecond && left < ttl.want-ttl.want/10 {
			c.Errorf("Renew for %v: %v remaining at best, want %v", ttl.given, left, ttl.want)
		}
	}
}

// cancelled returns a context that has ended: what is refused under it as invalid was refused before anything was sent.
func cancelled(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return ctx
}

func ttlRejected(c *check) {
	rec := c.acquire(c, c.name("held"), "owner-1", c.long)
	ttls := []time.Duration{0, -1, -time.Second, locker.MaxTTL + 1, locker.MaxTTL + time.Millisecond, math.MaxInt64, math.MinInt64}
	if c.fixed != 0 { // valid, but not for this Locker
		ttls = append(ttls, c.fixed-time.Millisecond, c.fixed+time.Millisecond, c.fixed/2, 2*c.fixed, locker.MinTTL)
	}
	for _, ttl := range ttls {
		for _, ctx := range []context.Context{c.ctx, cancelled(c.ctx)} {
			_, err := c.Acquire(ctx, c.name("free"), "owner-1", ttl)
			c.invalid(err, "ttl", "Acquire for %d ns", ttl)
			_, err = c.Acquire(ctx, rec.Resource, rec.Owner, ttl)
			c.invalid(err, "ttl", "Acquire again for %d ns", ttl)
			_, err = c.Renew(ctx, rec, ttl)
			c.invalid(err, "ttl", "Renew for %d ns", ttl)
			if l, ok := c.Locker.(locker.Handoverer); ok {
				_, err = l.Handover(ctx, rec, "owner-2", ttl)
				c.invalid(err, "ttl", "Handover for %d ns", ttl)
			}
			if l, ok := c.Locker.(locker.BatchRenewer); ok {
				_, err = l.RenewBatch(ctx, []locker.Record{rec}, ttl)
				c.invalid(err, "ttl", "RenewBatch for %d ns", ttl)
			}
		}
		c.free(c, c.name("free"))
		c.unchanged(c, rec)
	}
}

func contextCancelled(c *check) { contextEnded(c, cancelled(c.ctx), context.Canceled) }

func contextExpired(c *check) {
	ctx, cancel := context.WithDeadline(c.ctx, time.Now().Add(-time.Second))
	defer cancel()
	contextEnded(c, ctx, context.DeadlineExceeded)
}

func contextEnded(c *check, ctx context.Context, want error) {
	rec := c.acquire(c, c.name("held"), "owner-1", c.long)
	dead := c.expired(c, c.name("expired"), "owner-1")
	_, acquired := c.Acquire(ctx, c.name("free"), "owner-1", c.long)
	_, stolen := c.Acquire(ctx, dead.Resource, "owner-2", c.long)
	_, refused := c.Acquire(ctx, rec.Resource, "owner-2", c.long)
	_, again := c.Acquire(ctx, rec.Resource, "owner-1", c.long)
	_, renewed := c.Renew(ctx, rec, c.longer)
	_, got := c.Get(ctx, rec.Resource)
	for verb, err := range map[string]error{
		"Acquire of a free resource":    acquired,
		"Acquire of an expired one":     stolen,
		"Acquire of a held one":         refused,
		"Acquire by the same owner":     again,
		"Renew":                         renewed,
		"Release":                       c.Release(ctx, rec),
		"Release of what is not held":   c.Release(ctx, dead),
		"Get":                           got,
		"Get, wrapped as a caller does": fmt.Errorf("job: %w", got),
	} {
		if !errors.Is(err, want) {
			c.Errorf("%s: %v, want %q", verb, errorText(err), want)
		}
		for _, verdict := range []error{locker.ErrHeld, locker.ErrNotHeld, locker.ErrNotOwner, locker.ErrInvalid} {
			if errors.Is(err, verdict) {
				c.Errorf("%s: %q is the verdict %q, and nobody knows", verb, err, verdict)
			}
		}
	}
	c.free(c, c.name("free"))
	c.free(c, dead.Resource)
	c.unchanged(c, rec)
}

func contextTight(c *check) {
	for i := range c.rounds(50) {
		resource, owner := c.name(fmt.Sprint(i)), fmt.Sprintf("owner-%d", i)
		ctx, cancel := context.WithTimeout(c.ctx, rand.N(time.Millisecond))
		rec, err := c.Acquire(ctx, resource, owner, c.long)
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			c.Fatalf("Acquire with little time: %v, want a grant or %q", err, context.DeadlineExceeded)
		}
		got, geterr := c.Get(c.ctx, resource)
		switch {
		case geterr == nil && got.Owner != owner:
			c.Fatalf("%q holds the lock, which only %q has asked for", got.Owner, owner)
		case geterr != nil && (err == nil || !errors.Is(geterr, locker.ErrNotHeld)):
			c.Fatalf("Get after Acquire with little time (%v): %v", errorText(err), geterr)
		}
		// Statements that were given up may land late, so later tokens are not compared.
		again := c.acquire(c, resource, owner, c.long)
		if again.Token <= rec.Token {
			c.Errorf("token %d of the second grant after %d", again.Token, rec.Token)
		}
		_, err = c.Acquire(c.ctx, resource, "another", c.long)
		c.held(err, again, "acquire by another")
	}
}

func oneWinner(c *check) {
	for i := range c.rounds(20) {
		race(c, c.name(fmt.Sprint(i)), i)
	}
}

func oneWinnerExpired(c *check) {
	for i := range c.rounds(20) {
		resource := c.name(fmt.Sprint(i))
		rec := c.expired(c, resource, "dead")
		if token := race(c, resource, i); token <= rec.Token {
			c.Fatalf("token %d of the winner is not higher than %d of the expired grant", token, rec.Token)
		}
	}
}

// race lets 64 goroutines ask for resource at the same time and returns the winner's token.
func race(c *check, resource string, round int) int64 {
	const workers = 64
	var recs [workers]locker.Record
	var errs [workers]error
	start := make(chan struct{})
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			<-start
			recs[w], errs[w] = c.lockers[w%2].Acquire(c.ctx, resource, fmt.Sprintf("worker-%d", w), c.long)
		})
	}
	close(start)
	wg.Wait()
	var winners []locker.Record
	for w, err := range errs {
		if err == nil {
			winners = append(winners, recs[w])
		}
	}
	if len(winners) != 1 {
		c.Fatalf("round %d: %d of %d were granted the same resource, want one: %+v (errors: %v)", round, len(winners), workers, winners, errors.Join(errs[:]...))
	}
	for w, err := range errs {
		if err != nil {
			c.held(err, winners[0], "round %d: the acquire of worker-%d", round, w)
		}
	}
	c.unchanged(c, winners[0])
	return winners[0].Token
}

func counter(c *check) {
	const workers = 32
	var (
		resource = c.name("a")
		rounds   = c.rounds(200)
		inside   atomic.Bool
		n, last  atomic.Int64
		wg       sync.WaitGroup
	)
	for w := range workers {
		wg.Go(func() {
			l := c.lockers[w%2]
			for i := 0; i < rounds && !c.hasFailed(); i++ {
				rec, err := acquireWait(c, l, resource, fmt.Sprintf("worker-%d-%d", w, i))
				if err != nil {
					c.Errorf("Acquire: %v", err)
					return
				}
				if !inside.CompareAndSwap(false, true) {
					c.Errorf("worker-%d was granted the lock while another was inside", w)
					return
				}
				before := n.Load()
				if token := last.Swap(rec.Token); token >= rec.Token {
					c.Errorf("grant no. %d has token %d, the one before it %d", before+1, rec.Token, token)
				}
				runtime.Gosched() // let others in, if they can
				n.Store(before + 1)
				inside.Store(false)
				if err := l.Release(c.ctx, rec); err != nil {
					c.Errorf("Release: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	if got := n.Load(); !c.hasFailed() && got != int64(workers*rounds) {
		c.Errorf("%d goroutines counted to %d times %d and got %d", workers, workers, rounds, got)
	}
}

// acquireWait polls until resource is granted.
func acquireWait(c *check, l locker.Locker, resource, owner string) (locker.Record, error) {
	for n := 0; ; n++ {
		rec, err := l.Acquire(c.ctx, resource, owner, c.long)
		if !errors.Is(err, locker.ErrHeld) || c.hasFailed() {
			return rec, err
		}
		time.Sleep(rand.N(min(time.Millisecond<<min(n, 10), 80*time.Millisecond)))
	}
}

func noOverlap(c *check) {
	const workers = 8
	var (
		resource = c.name("a")
		rounds   = c.rounds(40)
		mu       sync.Mutex
		leases   []locker.Record // as last renewed
		wg       sync.WaitGroup
	)
	if c.fixed != 0 {
		rounds = min(rounds, 10) // each takes as long as a lease
	}
	keep := func(rec locker.Record) {
		mu.Lock()
		defer mu.Unlock()
		leases = append(leases, rec)
	}
	for w := range workers {
		wg.Go(func() {
			l := c.lockers[w%2]
			for i := 0; i < rounds && !c.hasFailed(); {
				// A new owner each time: the same one would be granted again and might cut its own lease short.
				rec, err := l.Acquire(c.ctx, resource, fmt.Sprintf("worker-%d-%d", w, i), c.ttl(time.Duration(1+rand.N(4))*time.Millisecond))
				var held *locker.HeldError
				if errors.As(err, &held) {
					time.Sleep(held.Holder.Remaining)
					continue
				}
				if err != nil {
					c.Errorf("Acquire: %v", err)
					return
				}
				// Renewed once, perhaps too late. Not for less than it has: it could end before the call returns, which is then refused.
				if i++; i%3 == 0 {
					if c.fixed != 0 {
						time.Sleep(rec.Remaining / 2) // at once it would add next to nothing
					}
					switch renewed, err := l.Renew(c.ctx, rec, c.ttl(5*time.Millisecond)); {
					case err == nil:
						if c.moving {
							keep(rec) // only this says when the lease began
						}
						rec = renewed
					case !errors.Is(err, locker.ErrNotHeld) && !errors.Is(err, locker.ErrNotOwner):
						c.Errorf("Renew: %v", err)
						return
					}
				}
				keep(rec)
			}
		})
	}
	wg.Wait()
	slices.SortFunc(leases, func(a, b locker.Record) int { return cmp.Compare(a.Token, b.Token) })
	for i := range leases[1:] {
		a, b := leases[i], leases[i+1]
		if a.Token == b.Token {
			c.Fatalf("%q and %q were granted with the same token, %d", a.Owner, b.Owner, a.Token)
		}
		if a.Owner != b.Owner && b.AcquiredAt.Before(a.ExpiresAt) {
			c.Fatalf("the lease of %q, token %d, ends at %v; that of %q, token %d, began %v before that",
				a.Owner, a.Token, a.ExpiresAt, b.Owner, b.Token, a.ExpiresAt.Sub(b.AcquiredAt))
		}
	}
}

func twoLockers(c *check) {
	resource := c.name("a")
	for i := range 2 {
		a, b := c.lockers[i], c.lockers[1-i]
		rec := c.acquire(a, resource, "owner-a", c.long)
		c.unchanged(b, rec)
		_, err := b.Acquire(c.ctx, resource, "owner-b", c.long)
		c.held(err, rec, "acquire through the other Locker")
		rec = c.renew(b, rec, c.longer)
		c.unchanged(a, rec)
		c.release(b, rec)
		c.free(a, resource)
		c.want(a.Release(c.ctx, rec), locker.ErrNotHeld, "release of what was released through the other Locker")
		next := c.acquire(b, resource, "owner-b", c.long)
		if next.Token <= rec.Token {
			c.Errorf("token %d through one Locker after %d through the other", next.Token, rec.Token)
		}
		_, err = a.Acquire(c.ctx, resource, "owner-a", c.long)
		c.held(err, next, "acquire through the first Locker")
		c.release(b, next)
	}
}
