// Package lockertest tests implementations of locker.Locker, and code that uses one.
//
// [Run] is the conformance suite: every promise of the interface as a named case that says which rule it protects. It is what the
// tables of this module pass on each database, and what a Locker of your own (a Dialect for another engine, a client of a service)
// can be held to:
//
//	func TestConformance(t *testing.T) {
//		lockertest.Run(t, func(t *testing.T) locker.Locker {
//			table, err := locker.New(openPool(t), mydb.Dialect(), locker.WithTable("lockertest"))
//			if err != nil {
//				t.Fatal(err)
//			}
//			return table
//		})
//	}
//
// [NewMemory] is a Locker in memory for the tests of code that takes one.
package lockertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/locker-go/locker"
)

// Purger is an optional interface of the Locker under test, which a Table has: with it Run also looks for what a purge may break.
// It purges with an idle time of 0, so everything in the store that is free or expired goes.
type Purger interface {
	Purge(ctx context.Context, idle time.Duration) (int64, error)
}

// RowDeleter is an optional interface of the Locker under test, for a wrapper in your test to implement: DeleteRow takes away all
// that the store knows of resource, as a DELETE by hand or a restored backup would. With it Run checks that tokens rise over that.
type RowDeleter interface {
	DeleteRow(ctx context.Context, resource string) error
}

// Blocker is an optional interface of the Locker under test, for a wrapper in your test to implement: Block makes changes of
// resource wait in the store, as a transaction that has locked the row does, until unblock is called. With it Run checks that a
// renewal or a claim that had to wait is a full lease or none.
type Blocker interface {
	Block(ctx context.Context, resource string) (unblock func(), err error)
}

// Expirer is an optional interface of the Locker under test, for a wrapper in your test to implement: Expire makes the lease of
// resource be over now, as if its ttl had passed. (It may move the lock's token back by that.) With a FixedTTL of a minute or more Run
// expires locks with it, as it does otherwise by a short ttl; without it the cases that need expired locks are skipped.
type Expirer interface {
	Expire(ctx context.Context, resource string) error
}

// Option changes what Run does.
type Option func(*suite)

// Except leaves out the case called name, as it stands in the output of go test -v, for a Locker whose documentation makes an
// exception of it. The case is reported as skipped, with reason.
func Except(name, reason string) Option {
	return func(s *suite) { s.except[name] = reason }
}

// FixedTTL is for a Locker that has one ttl and refuses every other as an *InvalidError. Every case asks for ttl, so one Run cannot
// do all of them: run it twice. With a minute or more (10 minutes is good) those cases run in which no lease may end by itself, see
// Expirer; with less (some 20 to 50 ms) those in which leases must run out. The others are reported as skipped, and in both Runs what
// is about different ttls.
func FixedTTL(ttl time.Duration) Option {
	return func(s *suite) { s.fixed, s.wrong = locker.CheckTTL(ttl) }
}

// MovingToken is for a Locker whose renewals, those in a batch too, return a new token: higher than the one before, and AcquiredAt
// with it. A renewal that is sent again with the record from before must succeed, as its answer may have been lost. So a record from
// before may name what its owner has now, and no case claims that an older grant of the same owner is dead. All that is said of
// other owners, of tokens that are too high and of what expired or was released holds as ever.
func MovingToken() Option {
	return func(s *suite) { s.moving = true }
}

// Run tests Lockers. Each property is a subtest of its own; one that fails says which rule it protects.
//
// newLocker is called twice, with t. Both Lockers must be handles on the same store, each with a pool of connections of its own if
// there is such a thing: Run checks that they exclude one another. (A store in memory may have one handle only; return it twice.)
// They are used for all cases, by up to 64 goroutines at a time. Clean up with t.Cleanup. The names of resources are new ones in
// each case and each run, so the store need not be empty, and several Runs may use one at the same time; but Run leaves rows
// behind, and purges if it can, so give it a table that holds nothing dear. The optional interfaces of package locker and those of
// this package are tested if the Locker has them, else their cases are skipped.
//
// A case that hangs fails with the stacks of all goroutines, and the cases after it are not run. go test -short does fewer rounds
// of what is done many times.
func Run(t *testing.T, newLocker func(*testing.T) locker.Locker, opts ...Option) {
	t.Helper()
	s := &suite{except: make(map[string]string), patience: 30 * time.Second, short: testing.Short()}
	for _, o := range opts {
		o(s)
	}
	if s.wrong != nil {
		t.Fatalf("lockertest.FixedTTL: %v", s.wrong)
	}
	cases := allCases()
	known := make(map[string]bool)
	for _, cs := range cases {
		known[cs.name] = true
	}
	for name := range s.except {
		if !known[name] {
			t.Fatalf("lockertest.Except(%q): there is no such case", name)
		}
	}
	s.lockers = [2]locker.Locker{newLocker(t), newLocker(t)}
	for _, cs := range cases {
		hung := false
		t.Run(cs.name, func(t *testing.T) {
			if reason, ok := s.except[cs.name]; ok {
				t.Skipf("excepted: %s", reason)
			}
			if cs.needs != nil && !cs.needs(s.lockers[0]) {
				t.Skip("the Locker does not have this optional interface")
			}
			if reason := s.excludes(cs); reason != "" {
				t.Skip(reason)
			}
			limit := cs.limit()
			if deadline, ok := t.Deadline(); ok {
				limit = min(limit, time.Until(deadline)*9/10) // the rest is for the report
			}
			hung = s.run(t, cs, limit)
		})
		if hung {
			t.Fatalf("%s hung; the cases after it were not run", cs.name)
		}
	}
}

// suite is one Run.
type suite struct {
	lockers  [2]locker.Locker
	except   map[string]string
	patience time.Duration // how long to wait for what must come some time
	short    bool
	fixed    time.Duration // the one ttl that the Locker has, or 0: any
	moving   bool          // a renewal moves the token
	wrong    error         // about fixed
}

// testCase is one property.
type testCase struct {
	name  string
	rule  string // the promise that it protects
	run   func(*check)
	needs func(locker.Locker) bool // nil: nothing but a Locker
	heavy bool                     // takes its time on a slow store

	leases leases
	dead   bool // it needs a lock whose time is over
}

// leases is what a case does with leases: more than one where it has a part for each. Without FixedTTL a Locker can do all.
type leases int

const (
	lasting leases = 1 << iota // none may end by itself while the case runs
	ending                     // they must run out, time and again
	varying                    // they have different ttls, and those are the point
)

// can reports whether the Locker can do at least one of what.
func (s *suite) can(what leases) bool {
	switch {
	case s.fixed == 0:
		return true
	case s.fixed < time.Minute:
		return what&ending != 0
	}
	return what&lasting != 0
}

// excludes says why a fixed ttl excludes the case; "" if it does not.
func (s *suite) excludes(cs testCase) string {
	switch {
	case !s.can(cs.leases) && cs.leases&ending != 0:
		return "needs FixedTTL of less than a minute"
	case !s.can(cs.leases) && cs.leases&lasting != 0:
		return "needs FixedTTL of a minute or more"
	case !s.can(cs.leases):
		return "a fixed ttl excludes this case"
	case s.fixed >= time.Minute && cs.dead && !has[Expirer](s.lockers[0]):
		return "with this ttl it needs an Expirer, which the Locker is not"
	}
	return ""
}

func (cs *testCase) limit() time.Duration {
	if cs.heavy {
		return 5 * time.Minute
	}
	return time.Minute
}

// has is for testCase.needs.
func has[Interface any](l locker.Locker) bool {
	_, ok := l.(Interface)
	return ok
}

// tb is what a case needs of a *testing.T. The tests of this package record failures with another.
type tb interface {
	Helper()
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
}

// run runs a case in a goroutine of its own and reports whether it was still running after limit.
func (s *suite) run(t tb, cs testCase, limit time.Duration) (hung bool) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := &check{
		suite: s, Locker: s.lockers[0], ctx: ctx, t: t, rule: cs.rule,
		prefix: fmt.Sprintf("lockertest %s %d ", cs.name, rand.Uint64()),
	}
	c.long, c.longer, c.shorter = c.ttl(long), c.ttl(2*long), c.ttl(long/2)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if r := recover(); r != nil {
				c.Errorf("panic: %v\n%s", r, debug.Stack())
			}
		}()
		cs.run(c)
	}()
	select {
	case <-done:
		return false
	case <-time.After(limit):
	}
	c.Errorf("still running after %v; all goroutines:\n\n%s", limit, stacks())
	cancel() // which may end it
	select {
	case <-done:
	case <-time.After(min(limit/20, time.Second)):
	}
	c.abandon()
	return true
}

func stacks() []byte {
	for size := 1 << 20; ; size *= 2 {
		buf := make([]byte, size)
		if n := runtime.Stack(buf, true); n < size || size >= 1<<26 {
			return buf[:n]
		}
	}
}

// check is what a case works with: the Locker under test and what to say about it.
type check struct {
	*suite
	locker.Locker
	ctx    context.Context // ends when the watchdog loses patience
	prefix string          // of the names of this case
	t      tb
	rule   string

	// Ttls that do not run out while a case of lasting leases runs. With FixedTTL they are all that one.
	long, longer, shorter time.Duration

	mu        sync.Mutex
	failed    bool
	abandoned bool // t is over
}

// Errorf reports a failure, the first one with the rule. It may be called from any goroutine.
func (c *check) Errorf(format string, args ...any) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.abandoned {
		return
	}
	if !c.failed {
		c.t.Logf("the rule: %s", strings.Join(strings.Fields(c.rule), " "))
	}
	c.failed = true
	c.t.Errorf(format, args...)
}

// Fatalf is Errorf, and the end of the case. It must be called from the case's own goroutine.
func (c *check) Fatalf(format string, args ...any) {
	c.t.Helper()
	c.Errorf(format, args...)
	runtime.Goexit()
}

func (c *check) hasFailed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failed
}

func (c *check) abandon() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.abandoned = true
}

// rounds is n, or a tenth of it in a short run.
func (c *check) rounds(n int) int {
	if c.short {
		return n / 10
	}
	return n
}

// ttl returns what a case wants, or the one ttl that the Locker has.
func (c *check) ttl(wanted time.Duration) time.Duration {
	if c.fixed != 0 {
		return c.fixed
	}
	return wanted
}

// name returns the name of a resource that nobody else uses.
func (c *check) name(s string) string { return c.prefix + s }

// acquire claims resource for owner, which must be granted, and checks the record.
func (c *check) acquire(l locker.Locker, resource, owner string, ttl time.Duration) locker.Record {
	c.t.Helper()
	rec, err := l.Acquire(c.ctx, resource, owner, ttl)
	if err != nil {
		c.Fatalf("Acquire(%q, %q, %v): %v, want a grant", resource, owner, ttl, err)
	}
	c.record(rec, resource, owner, ttl)
	return rec
}

// renew prolongs rec, which must succeed, and checks the record.
func (c *check) renew(l locker.Locker, rec locker.Record, ttl time.Duration) locker.Record {
	c.t.Helper()
	renewed, err := l.Renew(c.ctx, rec, ttl)
	if err != nil {
		c.Fatalf("Renew(%q of %q, token %d, %v): %v, want it renewed", rec.Resource, rec.Owner, rec.Token, ttl, err)
	}
	c.record(renewed, rec.Resource, rec.Owner, ttl)
	return renewed
}

// release frees rec, which must succeed.
func (c *check) release(l locker.Locker, rec locker.Record) {
	c.t.Helper()
	if err := l.Release(c.ctx, rec); err != nil {
		c.Fatalf("Release(%q of %q, token %d): %v, want it released", rec.Resource, rec.Owner, rec.Token, err)
	}
}

// get reads a lock that must be held.
func (c *check) get(l locker.Locker, resource string) locker.Record {
	c.t.Helper()
	rec, err := l.Get(c.ctx, resource)
	if err != nil {
		c.Fatalf("Get(%q): %v, want the lock, which is held", resource, err)
	}
	return rec
}

// free checks that nobody holds resource.
func (c *check) free(l locker.Locker, resource string) {
	c.t.Helper()
	rec, err := l.Get(c.ctx, resource)
	if err == nil {
		c.Errorf("Get(%q): held by %q with token %d, want ErrNotHeld", resource, rec.Owner, rec.Token)
		return
	}
	c.want(err, locker.ErrNotHeld, "Get(%q), which is free", resource)
}

// expired returns the record of a grant that is over because its time ran out.
func (c *check) expired(l locker.Locker, resource, owner string) locker.Record {
	c.t.Helper()
	ttl := c.ttl(locker.MinTTL)
	rec, err := l.Acquire(c.ctx, resource, owner, ttl)
	if err != nil {
		c.Fatalf("Acquire(%q, %q, %v): %v, want a grant", resource, owner, ttl, err)
	}
	c.expire(l, resource)
	return rec
}

// cut ends the lease of rec by letting it expire.
func (c *check) cut(l locker.Locker, rec locker.Record) {
	c.t.Helper()
	c.cutTo(l, rec, c.ttl(locker.MinTTL))
}

// cutTo renews rec for a ttl that is over soon, or for the fixed one, and waits until it is over. That may be before the call returns,
// so that ErrNotHeld is right too.
func (c *check) cutTo(l locker.Locker, rec locker.Record, ttl time.Duration) {
	c.t.Helper()
	renewed, err := l.Renew(c.ctx, rec, ttl)
	if err == nil {
		c.record(renewed, rec.Resource, rec.Owner, ttl)
	} else {
		c.want(err, locker.ErrNotHeld, "Renew(%q of %q, token %d, %v)", rec.Resource, rec.Owner, rec.Token, ttl)
	}
	c.expire(l, rec.Resource)
}

// expire waits until resource is free by itself. Where a fixed ttl is too long for that, the Locker's Expirer makes it so.
func (c *check) expire(l locker.Locker, resource string) {
	c.t.Helper()
	if c.fixed >= time.Minute {
		if err := c.Locker.(Expirer).Expire(c.ctx, resource); err != nil {
			c.Fatalf("Expire(%q): %v", resource, err)
		}
		c.free(l, resource)
		return
	}
	for begin := time.Now(); ; {
		rec, err := l.Get(c.ctx, resource)
		switch {
		case errors.Is(err, locker.ErrNotHeld):
			return
		case err != nil:
			c.Fatalf("Get(%q): %v, want the lock or ErrNotHeld", resource, err)
		case time.Since(begin) > c.patience:
			c.Fatalf("%q does not expire: after %v %q still holds it for %v", resource, c.patience, rec.Owner, rec.Remaining)
		}
		time.Sleep(min(rec.Remaining, 10*time.Millisecond))
	}
}

// pastToken waits until the store's clock is past token: a lock that was never acquired before tells.
func (c *check) pastToken(l locker.Locker, token int64) {
	c.t.Helper()
	for begin := time.Now(); ; {
		rec := c.expired(l, c.name(fmt.Sprintf("clock %d", rand.Uint64())), "clock")
		if rec.Token > token {
			return
		}
		if time.Since(begin) > c.patience {
			c.Fatalf("after %v the store's clock, %d, is not past token %d", c.patience, rec.Token, token)
		}
	}
}

// unchanged checks that a lock is as it was in before. (What Remaining says is not compared: a record counts off all that its call took.)
func (c *check) unchanged(l locker.Locker, before locker.Record) {
	c.t.Helper()
	now := c.get(l, before.Resource)
	if now.Owner != before.Owner || now.Token != before.Token || !now.AcquiredAt.Equal(before.AcquiredAt) || !now.ExpiresAt.Equal(before.ExpiresAt) {
		c.Errorf("the lock has changed:\nbefore %+v\nnow    %+v", before, now)
	}
}

// rightToken reports whether renewed has the token that a renewal of rec has: the same one, or with MovingToken a higher one.
func (c *check) rightToken(renewed, rec locker.Record) bool {
	if c.moving {
		return renewed.Token > rec.Token
	}
	return renewed.Token == rec.Token
}

// renewal checks the token and AcquiredAt of a renewal of rec.
func (c *check) renewal(renewed, rec locker.Record, format string, args ...any) {
	c.t.Helper()
	want, acquiredAt := fmt.Sprintf("%d and %v as granted", rec.Token, rec.AcquiredAt), rec.AcquiredAt
	if c.moving {
		want, acquiredAt = fmt.Sprintf("a token higher than %d, and the time that it is", rec.Token), time.UnixMicro(renewed.Token)
	}
	if !c.rightToken(renewed, rec) || !renewed.AcquiredAt.Equal(acquiredAt) {
		c.Errorf("%s: token %d and AcquiredAt %v, want %s", fmt.Sprintf(format, args...), renewed.Token, renewed.AcquiredAt, want)
	}
}

// clockSlack is what the store's clock and the one of this process may drift apart while a case runs.
const clockSlack = 20 * time.Millisecond

// slack is clockSlack for a case that takes about as long as a lease of ttl: less if that would excuse everything.
func slack(ttl time.Duration) time.Duration { return min(clockSlack, ttl/4) }

// record checks what is true of every record that is just granted or renewed.
func (c *check) record(rec locker.Record, resource, owner string, ttl time.Duration) {
	c.t.Helper()
	if rec.Resource != resource || rec.Owner != owner {
		c.Errorf("the record is of %q and %q, want %q and %q", rec.Resource, rec.Owner, resource, owner)
	}
	if rec.Token <= 0 {
		c.Errorf("token %d of %q is not positive", rec.Token, resource)
	}
	if ttl, _ := locker.CheckTTL(ttl); rec.Remaining < 0 || rec.Remaining > ttl {
		c.Errorf("%q has %v remaining, want from 0 to %v", resource, rec.Remaining, ttl)
	}
}

// want checks that err is the verdict, and no other one.
func (c *check) want(err, verdict error, format string, args ...any) {
	c.t.Helper()
	what := fmt.Sprintf(format, args...)
	if !errors.Is(err, verdict) {
		c.Errorf("%s: %v, want %q", what, errorText(err), verdict)
		return
	}
	for _, other := range []error{locker.ErrHeld, locker.ErrNotHeld, locker.ErrNotOwner, locker.ErrInvalid} {
		if other != verdict && errors.Is(err, other) {
			c.Errorf("%s: %q is %q as well as %q, want one verdict", what, err, other, verdict)
		}
	}
}

// held checks that err is a refusal because of holder, and returns what it says.
func (c *check) held(err error, holder locker.Record, format string, args ...any) *locker.HeldError {
	c.t.Helper()
	c.want(err, locker.ErrHeld, format, args...)
	var held *locker.HeldError
	if !errors.As(err, &held) {
		c.Fatalf("%s: %v is no *HeldError", fmt.Sprintf(format, args...), errorText(err))
	}
	if h := held.Holder; h.Resource != holder.Resource || h.Owner != holder.Owner {
		c.Errorf("%s: refused because of %q and %q, want %q and %q", fmt.Sprintf(format, args...), h.Resource, h.Owner, holder.Resource, holder.Owner)
	}
	return held
}

// invalid checks that err is an *InvalidError about field.
func (c *check) invalid(err error, field, format string, args ...any) {
	c.t.Helper()
	what := fmt.Sprintf(format, args...)
	c.want(err, locker.ErrInvalid, "%s", what)
	var invalid *locker.InvalidError
	switch {
	case err == nil:
	case !errors.As(err, &invalid):
		c.Errorf("%s: %v is no *InvalidError", what, err)
	case invalid.Field != field:
		c.Errorf("%s: the field is %q in %q, want %q", what, invalid.Field, err, field)
	}
}

func errorText(err error) string {
	if err == nil {
		return "no error"
	}
	return fmt.Sprintf("%q", err)
}
