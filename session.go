package locker

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"
)

// DefaultTTL is the TTL of a lock unless WithTTL sets another.
const DefaultTTL = 30 * time.Second

// Session takes locks for one process and keeps their leases alive with one heartbeat, until they are released or lost.
//
// Every acquire has an owner of its own, so a Session excludes its own goroutines from each other as it does other processes. Those
// who wait for one resource stand in line: only the first looks at the database, and a release hands the lock to the next in one
// statement.
//
// A lock is not reentrant: a callback of Do that locks the same resource again waits for itself.
//
// A Session is safe for concurrent use. Close it at the end.
type Session struct {
	locker Locker
	log    *slog.Logger
	label  string // what all owners of this session begin with
	skew   time.Duration
	fixed  time.Duration // the TTL of all leases, if the Locker has one
	lock   lockConfig    // defaults

	mu      sync.Mutex
	seq     int64
	closed  bool
	stopped bool
	open    context.Context // ends with Close
	close   context.CancelFunc
	kick    chan struct{} // wakes the heartbeat; holds one
	beating bool          // the heartbeat runs, which it does while there are leases
	leases  map[*Lease]struct{}
	beats   map[time.Duration]time.Time // by TTL, when all its leases are renewed next, together
	lines   map[string]*line            // by resource

	wakeAt  time.Time              // when the heartbeat looks next
	refused map[time.Duration]bool // by TTL, whether the last batch of renewals failed
	returns chan struct{}          // has a place for the give-back that asks the database

	callbacks gauge // of Do
	jobs      gauge // calls that ask for a lock or release one, the heartbeat, renewals, give-backs
}

// SessionOption configures a Session. Every LockOption is one too, as the default of the session's locks.
type SessionOption interface{ applySession(*Session) error }

// LockOption configures one lock.
type LockOption interface {
	SessionOption
	applyLock(*lockConfig) error
}

type lockConfig struct{ ttl, maxWait, minHold time.Duration }

type sessionOption func(*Session) error

func (o sessionOption) applySession(s *Session) error { return o(s) }

type lockOption func(*lockConfig) error

func (o lockOption) applyLock(c *lockConfig) error { return o(c) }
func (o lockOption) applySession(s *Session) error { return o(&s.lock) }

// WithTTL sets the TTL of the lease: how long a dead holder blocks others. It is renewed at a third of it. Default DefaultTTL.
func WithTTL(d time.Duration) LockOption {
	return lockOption(func(c *lockConfig) (err error) {
		c.ttl, err = CheckTTL(d)
		return err
	})
}

// WithMaxWait bounds the waiting of Lock and Do, besides their ctx. The error then matches context.DeadlineExceeded, and ErrHeld or
// what kept the lock from being asked. Default: no bound.
func WithMaxWait(d time.Duration) LockOption {
	return lockOption(func(c *lockConfig) error {
		if d <= 0 {
			return &InvalidError{"max wait", fmt.Sprintf("is %v; it must be more than 0 (TryLock does not wait)", d)}
		}
		c.maxWait = d
		return nil
	})
}

// WithMinHold keeps the lock for at least d: a job that ends earlier, with an error or without, leaves the lock to run out instead of
// releasing it, so that a job that ten skewed clocks start once a night runs once. Nobody waits for that: Release, Do and Close return
// at once. Choose d longer than the clocks differ and shorter than the job's period; it has nothing to do with the TTL, which is all that a
// job keeps whose process was killed, or whose last request did not reach the database. Default 0.
func WithMinHold(d time.Duration) LockOption {
	return lockOption(func(c *lockConfig) error {
		if d < 0 || d > MaxTTL {
			return &InvalidError{"min hold", fmt.Sprintf("is %v; it must be from 0 to ten years", d)}
		}
		c.minHold = d
		return nil
	})
}

// WithOwner sets what owners begin with, for people who read the table; the default is host:pid. A random part and a number are
// always added: names alone have made two holders elsewhere. At most 200 bytes.
func WithOwner(label string) SessionOption {
	return sessionOption(func(s *Session) error {
		if err := CheckName("owner", label); err != nil {
			return err
		}
		if len(label) > maxLabel {
			return &InvalidError{"owner", fmt.Sprintf("has %d bytes; a label may have %d, because a unique part is added", len(label), maxLabel)}
		}
		s.label = label
		return nil
	})
}

const maxLabel = 200

// WithLogger sets where losses, failed renewals and failed releases are logged. Default: nowhere.
func WithLogger(log *slog.Logger) SessionOption {
	return sessionOption(func(s *Session) error {
		if log == nil {
			return &InvalidError{"logger", "is nil"}
		}
		s.log = log
		return nil
	})
}

// NewSession returns a Session that takes its locks from l. Nothing is sent. If l has a method ClockSkew() time.Duration, as a Table
// does, that is the margin, unless it is 0. If l has a method TTL() time.Duration, as a RowTable does, that is the TTL of all locks;
// then WithMinHold is ErrInvalid, because a lease cannot be left to run out at another time.
func NewSession(l Locker, opts ...SessionOption) (*Session, error) {
	if l == nil {
		return nil, &InvalidError{"locker", "is nil"}
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	host = strings.ToValidUTF8(host, "?")
	s := &Session{
		locker:  l,
		log:     slog.New(slog.DiscardHandler),
		label:   fmt.Sprintf("%.150s:%d", host, os.Getpid()),
		lock:    lockConfig{ttl: DefaultTTL},
		returns: make(chan struct{}, 1),
		kick:    make(chan struct{}, 1),
		leases:  make(map[*Lease]struct{}),
		beats:   make(map[time.Duration]time.Time),
		refused: make(map[time.Duration]bool),
		lines:   make(map[string]*line),
	}
	if t, ok := l.(interface{ ClockSkew() time.Duration }); ok {
		s.skew = t.ClockSkew()
	}
	if t, ok := l.(interface{ TTL() time.Duration }); ok {
		s.fixed = t.TTL()
		s.lock.ttl = s.fixed
	}
	for _, o := range opts {
		if o == nil {
			return nil, &InvalidError{"option", "is nil"}
		}
		if err := o.applySession(s); err != nil {
			return nil, err
		}
	}
	s.open, s.close = context.WithCancel(context.Background())
	if err := s.check(s.lock); err != nil {
		return nil, err
	}
	unique := make([]byte, 8)
	rand.Read(unique) // never fails
	s.label += "/" + hex.EncodeToString(unique)
	return s, nil
}

// margin is how long before its end a lease of ttl is no longer trusted.
func (s *Session) margin(ttl time.Duration) (time.Duration, error) {
	if s.skew == 0 {
		return ttl / 10, nil
	}
	if s.skew > ttl/2 {
		return 0, &InvalidError{"ttl", fmt.Sprintf("is %v, less than twice the clock skew of %v", ttl, s.skew)}
	}
	return s.skew, nil
}

// check returns nil if locks can be had with c.
func (s *Session) check(c lockConfig) error {
	switch {
	case s.fixed != 0 && c.ttl != s.fixed:
		return &InvalidError{"ttl", fmt.Sprintf("is %v; all leases of this Locker have %v", c.ttl, s.fixed)}
	case s.fixed != 0 && c.minHold > 0:
		return &InvalidError{"min hold", fmt.Sprintf("is %v; leases of this Locker have a TTL of %v and cannot be left to run out at another time",
			c.minHold, s.fixed)}
	}
	_, err := s.margin(c.ttl)
	return err
}

// config is the defaults with opts, all checked.
func (s *Session) config(resource string, opts []LockOption) (lockConfig, error) {
	c := s.lock
	if err := CheckName("resource", resource); err != nil {
		return c, err
	}
	for _, o := range opts {
		if o == nil {
			return c, &InvalidError{"option", "is nil"}
		}
		if err := o.applyLock(&c); err != nil {
			return c, err
		}
	}
	return c, s.check(c)
}

// TryLock takes resource if it is free, and is *HeldError (errors.Is ErrHeld) at once if it is not. Any other error means that the
// database could not be asked, or that the answer was lost; a lock that was taken all the same is given back in the background.
//
// ctx bounds the call only. The lease lives until it is released or lost.
func (s *Session) TryLock(ctx context.Context, resource string, opts ...LockOption) (*Lease, error) {
	return s.tryLock(ctx, resource, opts, false)
}

// Lock takes resource, waiting in line while it is held. It waits on while the database cannot be reached, and not at all if there
// is no table or no privilege. When ctx, or WithMaxWait, ends first, the error matches that and ErrHeld or the cause.
//
// ctx bounds the waiting and nothing else. The lease lives until it is released or lost.
func (s *Session) Lock(ctx context.Context, resource string, opts ...LockOption) (*Lease, error) {
	return s.waitLock(ctx, resource, opts, false)
}

// Do locks resource as Lock does, runs fn under the lease's context, and releases, also if fn panics.
//
// If the lease was lost, the error matches ErrLost (as *LostError) and is joined with fn's, even if that is nil: others may have run
// at the same time. If only the release failed, that is logged and the TTL frees the lock. Otherwise the error is fn's.
func (s *Session) Do(ctx context.Context, resource string, fn func(context.Context, *Lease) error, opts ...LockOption) error {
	l, err := s.waitLock(ctx, resource, opts, true)
	if err != nil {
		return err
	}
	return s.call(ctx, l, fn)
}

// TryDo is Do without waiting: ran is false, and err nil, if resource is held. So an ErrHeld from inside fn is not taken for a skip.
func (s *Session) TryDo(ctx context.Context, resource string, fn func(context.Context, *Lease) error, opts ...LockOption) (ran bool, err error) {
	l, err := s.tryLock(ctx, resource, opts, true)
	switch {
	case errors.Is(err, ErrHeld):
		return false, nil
	case err != nil:
		return false, err
	}
	return true, s.call(ctx, l, fn)
}

func (s *Session) call(ctx context.Context, l *Lease, fn func(context.Context, *Lease) error) (err error) {
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.callbacks.done()
	}()
	inside, cancel := l.Context(ctx)
	defer func() {
		cancel()
		released := l.Release(ctx)
		switch {
		case errors.Is(released, ErrLost):
			err = errors.Join(released, err) // a panic goes on past it
		case released != nil:
			s.log.Warn("locker: release failed, the TTL will free it", "resource", l.Record().Resource, "error", released)
		}
	}()
	if inside.Err() != nil { // between the grant and here
		return context.Cause(inside)
	}
	return fn(inside, l)
}

// Close ends the session: new locks are refused with ErrClosed, contexts of leases end with that cause, the callbacks of Do are waited
// for, all leases are released, and the heartbeat stops. If ctx ends before that, Close returns its error, the heartbeat stops all the
// same, and what is left expires by itself; a lock is never released under a running callback. If ctx has ended already, as it often
// has when a program is told to stop, and no callback runs, Close takes up to five seconds to release all the same.
func (s *Session) Close(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.close()
	for l := range s.leases {
		l.end(fmt.Errorf("locker: lease on %q: %w", l.rec.Resource, ErrClosed))
	}
	if ctx.Err() != nil && s.callbacks.n == 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
	}
	err := s.drain(ctx, &s.callbacks)
	if err == nil {
		err = s.releaseAll(ctx)
	}
	s.stopped = true
	s.wake()
	if err == nil {
		err = s.drain(ctx, &s.jobs)
	}
	if err != nil {
		return fmt.Errorf("locker: close: %w", err)
	}
	return nil
}

// releaseAll releases what is held, until ctx ends. s.mu is held, and let go meanwhile.
func (s *Session) releaseAll(ctx context.Context) error {
	rest := make(chan *Lease, len(s.leases))
	for l := range s.leases {
		rest <- l
	}
	close(rest)
	s.mu.Unlock()
	defer s.mu.Lock()
	var releases sync.WaitGroup
	for range min(len(rest), parallel) {
		releases.Go(func() {
			for l := range rest {
				if ctx.Err() != nil {
					return
				}
				if err := l.Release(ctx); err != nil {
					s.log.Warn("locker: release failed, the TTL will free it", "resource", l.Record().Resource, "error", err)
				}
			}
		})
	}
	releases.Wait() // bounded, as each Release is
	return ctx.Err()
}

// gauge counts what Close waits for. Guarded by s.mu.
type gauge struct {
	n    int
	zero chan struct{} // closed when n is 0, if somebody waits for that
}

func (g *gauge) done() {
	if g.n--; g.n == 0 && g.zero != nil {
		close(g.zero)
		g.zero = nil
	}
}

// drain waits until g is 0 or ctx ends. s.mu is held, and let go meanwhile.
func (s *Session) drain(ctx context.Context, g *gauge) error {
	for g.n > 0 {
		if g.zero == nil {
			g.zero = make(chan struct{})
		}
		zero := g.zero
		s.mu.Unlock()
		var err error
		select {
		case <-zero:
		case <-ctx.Done():
			err = ctx.Err()
		}
		s.mu.Lock()
		if err != nil {
			return err
		}
	}
	return nil
}

// background runs f in a goroutine that Close waits for. s.mu is held.
func (s *Session) background(f func()) {
	s.jobs.n++
	go func() {
		f()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.jobs.done()
	}()
}

// report logs without waiting for the handler, which may block: a full pipe must not keep a lease's context from ending. s.mu is held.
func (s *Session) report(level slog.Level, message string, args ...any) {
	if s.log.Enabled(context.Background(), level) {
		s.background(func() { s.log.Log(context.Background(), level, message, args...) })
	}
}

// parallel is how many single requests a session has under way at once where there is no batch.
const parallel = 8

// adopt makes a lease of a grant that was asked for at begin. It returns nil, and gives the grant back, if that cannot be trusted any
// more or the session is closed: its owner must not be used again then. s.mu is held.
func (s *Session) adopt(rec Record, begin time.Time, c lockConfig, inDo bool) *Lease {
	margin, _ := s.margin(c.ttl)
	l := &Lease{s: s, ttl: c.ttl, margin: margin, minHold: c.minHold, begin: begin, rec: rec, trust: begin.Add(c.ttl - margin)}
	ln := s.line(rec.Resource)
	older := ln.holder != nil && ln.holder.rec.Token > rec.Token // forced, then granted again, and the answers crossed
	if older || s.closed || l.over(time.Now()) {
		s.giveBack(rec.Resource, rec.Owner, c.ttl)
		s.next(rec.Resource, ln)
		return nil
	}
	if before := ln.holder; before != nil {
		if _, held := s.leases[before]; held {
			ln.holder = l // so that nobody is woken
			s.lose(before, ErrNotOwner)
		}
	}
	if inDo {
		s.callbacks.n++
	}
	s.leases[l] = struct{}{}
	s.schedule(l, begin)
	ln.holder, ln.why = l, nil
	switch {
	case !s.beating:
		s.beating = true
		s.background(s.heartbeat)
	case l.due.Before(s.wakeAt) || l.trust.Before(s.wakeAt):
		s.wake()
	}
	return l
}

// schedule sets when l, confirmed at begin, is renewed: together with all leases of its TTL, a third of it after the last time.
func (s *Session) schedule(l *Lease, begin time.Time) {
	third := begin.Add(l.ttl / 3)
	if next := s.beats[l.ttl]; next.After(begin) && next.Before(third) {
		l.due = next
		return
	}
	s.beats[l.ttl] = third
	l.due = third
}

// wake makes the heartbeat look again.
func (s *Session) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// heartbeat is the one goroutine that watches all leases: it ends the trust of each in time, whether or not the database answers,
// and starts the renewals that are due. It ends when there are no leases.
func (s *Session) heartbeat() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		next, ok := s.beat()
		if !ok {
			return
		}
		timer.Reset(next)
		select {
		case <-timer.C:
		case <-s.kick:
		}
	}
}

// beat looks at all leases once. It returns how long until the next look, or false if there is nothing left to look at.
func (s *Session) beat() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.leases) == 0 || s.stopped {
		s.beating = false
		clear(s.beats)
		return 0, false
	}
	if len(s.beats) > len(s.leases) {
		clear(s.beats) // TTLs that nobody has any more
	}
	now := time.Now()
	next := now.Add(time.Second) // at least: a suspended machine stops timers, and only the wall clock tells afterwards
	var due map[time.Duration][]*Lease
	for l := range s.leases {
		if l.over(now) {
			s.lose(l, l.cause())
			continue
		}
		if l.trust.Before(next) {
			next = l.trust
		}
		switch {
		case l.busy != nil:
		case now.Before(l.due):
			if l.due.Before(next) {
				next = l.due
			}
		default:
			l.busy = make(chan struct{})
			if due == nil {
				due = make(map[time.Duration][]*Lease)
			}
			due[l.ttl] = append(due[l.ttl], l)
		}
	}
	for ttl, leases := range due {
		recs := make([]Record, len(leases))
		for i, l := range leases {
			recs[i] = l.rec
		}
		s.background(func() { s.renew(ttl, leases, recs) })
	}
	s.wakeAt = next
	return next.Sub(now), true
}

// renew renews leases of one TTL, in one request if the Locker can, and settles each of them. One attempt gets a sixth of the TTL, so
// that one half-open connection cannot eat all of the trust.
func (s *Session) renew(ttl time.Duration, leases []*Lease, recs []Record) {
	failure := errUnconfirmed
	if batch, ok := s.locker.(BatchRenewer); ok && len(leases) > 1 {
		begin := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), ttl/6)
		renewed, err := batch.RenewBatch(ctx, recs, ttl)
		cancel()
		byName := make(map[string]Record, len(renewed))
		for _, r := range renewed {
			byName[r.Resource] = r
		}
		s.mu.Lock()
		// Those that a batch leaves out are lost, or skipped because a transaction has locked the row: only a single renewal says which.
		// And an engine may not know the batch's statement, or one record spoil it for all.
		singly := err == nil || s.refused[ttl] || isPermanent(err)
		delete(s.refused, ttl)
		if err != nil {
			s.refused[ttl] = true
		}
		retry := s.retryTime(ttl)
		var rest []*Lease
		var restRecs []Record
		for i, l := range leases {
			r, ok := byName[recs[i].Resource]
			switch {
			case ok && r.Owner == recs[i].Owner:
				s.settle(l, r, begin, retry, nil)
			case singly:
				rest, restRecs = append(rest, l), append(restRecs, recs[i])
			default:
				s.settle(l, r, begin, retry, err)
			}
		}
		s.mu.Unlock()
		s.wake()
		leases, recs = rest, restRecs
		if err != nil {
			failure = err
		}
	}
	next := make(chan int, len(leases))
	for i := range leases {
		next <- i
	}
	close(next)
	begin := time.Now()
	var workers sync.WaitGroup
	for range min(len(leases), parallel) {
		workers.Go(func() {
			for i := range next {
				if i >= parallel && time.Since(begin) > ttl/6 {
					// Rows that block must not keep the others waiting behind them: they are due again, in a batch if there is one.
					s.mu.Lock()
					s.settle(leases[i], Record{}, begin, time.Now(), failure)
					s.mu.Unlock()
					continue
				}
				s.renewOne(leases[i], recs[i], len(leases) > parallel)
			}
		})
	}
	workers.Wait()
	s.wake()
}

// renewOne renews l by itself. One of many gets a short attempt if it was confirmed the last time.
func (s *Session) renewOne(l *Lease, rec Record, many bool) {
	s.mu.Lock()
	limit := min(l.ttl/6, time.Until(l.trust))
	if many && l.failure == nil {
		limit = min(l.ttl/30, limit)
	}
	s.mu.Unlock()
	begin := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	r, err := s.locker.Renew(ctx, rec, l.ttl)
	cancel()
	s.mu.Lock()
	s.settle(l, r, begin, s.retryTime(l.ttl), err)
	s.mu.Unlock()
}

// retryTime is when a renewal that failed now is tried again: some twenty times within the trust that is left.
func (s *Session) retryTime(ttl time.Duration) time.Time {
	return time.Now().Add(ttl/60 + mathrand.N(ttl/60+1) + time.Millisecond)
}

// settle takes the answer to a renewal of l that was sent at begin. s.mu is held.
func (s *Session) settle(l *Lease, rec Record, begin, retry time.Time, err error) {
	close(l.busy)
	l.busy = nil
	if _, held := s.leases[l]; !held {
		if err == nil {
			l.rec = rec // what Release has to free
		}
		return
	}
	switch {
	case err == nil:
		if l.failure != nil {
			s.report(slog.LevelInfo, "locker: renewed again", "resource", rec.Resource, "token", rec.Token)
		}
		l.rec, l.failure = rec, nil
		l.trust = begin.Add(l.ttl - l.margin)
		s.schedule(l, begin)
	case isVerdict(err):
		s.lose(l, err)
	default:
		if l.failure == nil {
			s.report(slog.LevelWarn, "locker: renewal failed, trying on", "resource", l.rec.Resource, "token", l.rec.Token,
				"trusted_for", time.Until(l.trust), "error", err)
		}
		l.failure = err
		l.due = retry
	}
}

// lose ends l, which is held, with its cause. s.mu is held.
func (s *Session) lose(l *Lease, cause error) {
	l.lost = &LostError{Lease: l.rec, Err: cause}
	l.end(l.lost)
	l.ended = l.lost // also where Close has ended the contexts before
	s.drop(l)
	s.report(slog.LevelWarn, "locker: lease lost", "resource", l.rec.Resource, "token", l.rec.Token, "error", cause)
}

// drop takes l from the heartbeat and lets the next in line look. s.mu is held.
func (s *Session) drop(l *Lease) {
	delete(s.leases, l)
	ln := s.lines[l.rec.Resource]
	if ln == nil {
		return
	}
	if ln.holder == l {
		ln.holder = nil
	}
	if ln.holder == nil {
		s.next(l.rec.Resource, ln)
	}
}

// giveBack frees, in the background, what an acquire for owner may have taken although it ended with an error. The statement may even
// take effect after this has looked, so it looks more than once. Owners are never used again, so nobody else's grant is freed; and
// what is missed has no renewer and ends with its TTL. One asks at a time: the pool is the renewals'. s.mu is held.
func (s *Session) giveBack(resource, owner string, ttl time.Duration) {
	s.background(func() {
		limit, cancel := context.WithTimeout(context.Background(), min(ttl, 10*time.Second))
		defer cancel()
		for _, delay := range []time.Duration{0, 20 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond, 2 * time.Second} {
			select {
			case <-time.After(delay):
			case <-s.open.Done(): // no time left: look now
			}
			select {
			case s.returns <- struct{}{}:
			case <-limit.Done():
				return
			}
			ctx, cancel := context.WithTimeout(limit, 2*time.Second)
			rec, err := s.locker.Get(ctx, resource)
			done := err == nil // another has it
			if err == nil && rec.Owner == owner {
				done = s.locker.Release(ctx, rec) == nil
			}
			cancel()
			<-s.returns
			if done || isPermanent(err) {
				return
			}
		}
	})
}
