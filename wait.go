package locker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Waiting. Those who wait for a resource in one session form a line. While the session itself has the lock nobody asks the database:
// the release hands over. Otherwise the first in line polls, by reading, so that waiting writes nothing.

const (
	firstPoll = 5 * time.Millisecond // doubled each time, jittered
	lastPoll  = 200 * time.Millisecond

	// Handing over inside the process starves other processes, so after so many in a row, if they took that long, the lock is
	// released and left alone for a moment.
	streakCount = 16
	streakTime  = time.Second
	streakPause = lastPoll / 2
)

// line is those of one session who want one resource.
type line struct {
	holder  *Lease // the session's own lease, also while it is being released
	waiters []*waiter
	users   int       // the waiters, and those to whom the lock is on its way
	why     error     // what stood in the way of the first in line the last time
	until   time.Time // if that is a *HeldError: when its lease is over

	handovers int       // in a row
	since     time.Time // the first of them
	pause     time.Time // no claim before this
}

type waiter struct {
	owner  string
	config lockConfig
	inDo   bool
	wake   chan struct{} // holds one

	// Guarded by s.mu.
	asking  bool   // a request for owner is under way, so that nothing may be handed to it
	unknown bool   // a request for owner ended with an error and may have taken the lock all the same
	lease   *Lease // handed over
	gone    bool
}

// line returns the line of resource. s.mu is held.
func (s *Session) line(resource string) *line {
	ln := s.lines[resource]
	if ln == nil {
		ln = &line{}
		s.lines[resource] = ln
	}
	return ln
}

// next wakes the first in line, or removes a line that nobody needs. s.mu is held.
func (s *Session) next(resource string, ln *line) {
	switch {
	case len(ln.waiters) > 0:
		ln.waiters[0].nudge()
	case ln.holder == nil && ln.users == 0:
		delete(s.lines, resource)
	}
}

func (w *waiter) nudge() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// owner returns an owner that was never used before. s.mu is held.
func (s *Session) owner() string {
	s.seq++
	return fmt.Sprintf("%s/%d", s.label, s.seq)
}

func (s *Session) tryLock(ctx context.Context, resource string, opts []LockOption, inDo bool) (*Lease, error) {
	c, err := s.config(resource, opts)
	if err != nil {
		return nil, err
	}
	margin, _ := s.margin(c.ttl)
	ctx, cancel := context.WithTimeout(ctx, c.ttl-margin) // later, the grant would be of no use
	defer cancel()
	defer context.AfterFunc(s.open, cancel)()

	s.mu.Lock()
	defer s.mu.Unlock()
	ln := s.lines[resource]
	switch {
	case s.closed:
		return nil, closedError(resource)
	case ln != nil && ln.holder != nil:
		return nil, &HeldError{ln.holder.now()}
	case ln != nil && errors.Is(ln.obstacle(), ErrHeld): // those in line come first
		return nil, ln.obstacle()
	}
	s.jobs.n++
	defer s.jobs.done()
	owner := s.owner()
	begin := time.Now()
	s.mu.Unlock()
	rec, err := s.locker.Acquire(ctx, resource, owner, c.ttl)
	s.mu.Lock()
	switch {
	case err == nil:
		if l := s.adopt(rec, begin, c, inDo); l != nil {
			return l, nil
		}
		err = fmt.Errorf("locker: lock %q: the answer took longer than the lease of %v can be trusted", resource, c.ttl)
	case !errors.Is(err, ErrHeld) && !isPermanent(err):
		s.giveBack(resource, owner, c.ttl)
	}
	if s.closed && !errors.Is(err, ErrHeld) {
		err = closedError(resource)
	}
	return nil, err
}

func closedError(resource string) error {
	return fmt.Errorf("locker: lock %q: %w", resource, ErrClosed)
}

// obstacle is what stood in the way of the first in line the last time, if that may still be so. s.mu is held.
func (ln *line) obstacle() error {
	var held *HeldError
	if !errors.As(ln.why, &held) {
		return ln.why
	}
	left := time.Until(ln.until)
	if left <= 0 {
		return nil
	}
	holder := held.Holder
	holder.Remaining = left
	return &HeldError{holder}
}

func (s *Session) waitLock(ctx context.Context, resource string, opts []LockOption, inDo bool) (*Lease, error) {
	c, err := s.config(resource, opts)
	if err != nil {
		return nil, err
	}
	if c.maxWait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.maxWait)
		defer cancel()
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, closedError(resource)
	}
	w := &waiter{owner: s.owner(), config: c, inDo: inDo, wake: make(chan struct{}, 1)}
	ln := s.line(resource)
	ln.waiters = append(ln.waiters, w)
	ln.users++
	s.jobs.n++
	s.mu.Unlock()

	l, err := s.wait(ctx, resource, ln, w)

	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.jobs.done()
	w.gone = true
	ln.users--
	i := slices.Index(ln.waiters, w)
	if i >= 0 {
		ln.waiters = slices.Delete(ln.waiters, i, i+1)
	}
	if i == 0 || ln.holder == nil {
		s.next(resource, ln)
	}
	if l == nil && w.lease != nil { // handed over at the last moment
		return w.lease, nil
	}
	if l == nil && w.unknown {
		s.giveBack(resource, w.owner, c.ttl)
	}
	return l, err
}

// waitError is the end of a wait: by ctx, and what stood in the way, if anything had answered.
type waitError struct {
	resource   string
	ended, why error
}

func (e *waitError) Error() string {
	if e.why == nil {
		return fmt.Sprintf("locker: lock %q: %v", e.resource, e.ended)
	}
	return fmt.Sprintf("locker: lock %q: %v: %s", e.resource, e.ended, bare(e.why))
}

func (e *waitError) Unwrap() []error {
	if e.why == nil {
		return []error{e.ended}
	}
	return []error{e.ended, e.why}
}

// wait waits until w has the lock.
func (s *Session) wait(ctx context.Context, resource string, ln *line, w *waiter) (*Lease, error) {
	var last error // what stood in the way
	poll := firstPoll
	asked, warned, early := false, false, false
	for {
		s.mu.Lock()
		if w.lease != nil {
			defer s.mu.Unlock()
			return w.lease, nil
		}
		delay := time.Duration(-1) // until woken
		switch first := len(ln.waiters) > 0 && ln.waiters[0] == w; {
		case s.closed:
			s.mu.Unlock()
			return nil, closedError(resource)
		case ln.holder != nil:
			last = &HeldError{ln.holder.now()}
		case first:
			delay = max(0, time.Until(ln.pause))
		default:
			last = cmp.Or(ln.obstacle(), last)
		}
		if ctx.Err() != nil {
			last = cmp.Or(last, ln.obstacle())
			s.mu.Unlock()
			return nil, &waitError{resource, ctx.Err(), last}
		}
		w.asking = delay == 0
		s.mu.Unlock()

		var watch *Record // wake up when this one lets go
		if delay == 0 {
			l, err := s.ask(ctx, resource, w, asked)
			asked = true
			var held *HeldError
			switch {
			case l != nil:
				return l, nil
			case err == nil: // granted too late to be trusted: at once again
				continue
			case ctx.Err() != nil && last != nil: // cut off: the obstacle is the one before
				continue
			case errors.As(err, &held):
				delay = held.Holder.Remaining + time.Millisecond
				if !early {
					watch = &held.Holder
				}
			case isPermanent(err):
				return nil, err
			default:
				delay = lastPoll
				if !warned && !errors.Is(err, ErrHeld) {
					s.log.Warn("locker: lock cannot be asked for, trying on", "resource", resource, "error", err)
					warned = true
				}
			}
			last = err
			s.mu.Lock()
			ln.why = err
			if held != nil {
				ln.until = time.Now().Add(held.Holder.Remaining)
			}
			s.mu.Unlock()
			delay = min(delay, poll/2+rand.N(poll/2))
			poll = min(2*poll, lastPoll)
		}
		woken := s.sleep(ctx, w, delay, watch)
		early = woken == byHolder // do not spin on wake-ups that come too early
		if woken == byLine {
			poll = firstPoll
		}
	}
}

// ask acquires resource for w once; if w has asked before, it looks first. Neither a lease nor an error: the grant came too late to be
// trusted.
func (s *Session) ask(ctx context.Context, resource string, w *waiter, look bool) (l *Lease, err error) {
	ctx, cancel := context.WithTimeout(ctx, w.config.ttl/3+time.Millisecond) // then a fresh connection is tried
	defer cancel()
	defer context.AfterFunc(s.open, cancel)()
	var sent bool
	var begin time.Time
	var rec Record
	if look {
		rec, err = s.locker.Get(ctx, resource)
		if err == nil && rec.Owner != w.owner { // if it is w's, an acquire whose answer was lost has taken it: acquire again
			err = &HeldError{rec}
		}
	}
	if err == nil || errors.Is(err, ErrNotHeld) {
		sent, begin = true, time.Now()
		rec, err = s.locker.Acquire(ctx, resource, w.owner, w.config.ttl)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	w.asking = false
	switch {
	case err == nil:
		if l = s.adopt(rec, begin, w.config, w.inDo); l == nil {
			w.owner = s.owner() // given back, and so never to be used again
		}
		w.unknown = false
	case errors.Is(err, ErrHeld):
		w.unknown = false
	default:
		w.unknown = w.unknown || sent && !isPermanent(err)
	}
	return l, err
}

type wakeUp int

const (
	byTimer wakeUp = iota
	byHolder
	byLine
)

// sleep waits for d (d < 0: for ever), for watch to let go, a wake-up, the end of ctx or of the session.
func (s *Session) sleep(ctx context.Context, w *waiter, d time.Duration, watch *Record) wakeUp {
	var timer <-chan time.Time
	if d >= 0 {
		timer = time.After(d)
	}
	var free chan struct{}
	if waiter, ok := s.locker.(Waiter); ok && watch != nil {
		free = make(chan struct{})
		ctx, cancel := context.WithCancel(ctx)
		defer func() {
			cancel()
			<-free
		}()
		go func() {
			defer close(free)
			if waiter.WaitFree(ctx, *watch) != nil {
				<-ctx.Done() // there is no wake-up to be had, so the timer wakes
			}
		}()
	}
	select {
	case <-free:
		return byHolder
	case <-w.wake:
		return byLine
	case <-timer:
	case <-ctx.Done():
	case <-s.open.Done():
	}
	return byTimer
}

// handOver ends the grant rec of l: to the next in line if there is one, by a release if not.
func (s *Session) handOver(ctx context.Context, l *Lease, rec Record) error {
	hand, can := s.locker.(Handoverer)
	mine := true // rec is still l's own, not a waiter's who has gone
	for can {
		w := s.nextInLine(rec.Resource)
		if w == nil {
			break
		}
		owner, begin := w.owner, time.Now()
		attempt, cancel := context.WithTimeout(ctx, max(l.ttl/6, 100*time.Millisecond))
		given, err := hand.Handover(attempt, rec, owner, w.config.ttl)
		cancel()
		verdict := isVerdict(err)
		if err != nil && !verdict {
			// The answer was lost. If w has the lock now, it finds that out by its owner; if not, this frees it.
			err = s.insist(ctx, l.ttl, func(ctx context.Context) error { return s.locker.Release(ctx, rec) })
			if errors.Is(err, ErrNotOwner) {
				if now, getErr := s.locker.Get(ctx, rec.Resource); getErr != nil || now.Owner == owner {
					err = nil
				}
			}
			verdict = isVerdict(err)
			given = Record{}
		}
		s.mu.Lock()
		ln := s.line(rec.Resource)
		if given.Owner == "" {
			s.backInLine(rec.Resource, ln, w)
			s.mu.Unlock()
			if verdict && !mine {
				return nil
			}
			return err
		}
		if !w.gone {
			if w.lease = s.adopt(given, begin, w.config, w.inDo); w.lease != nil {
				ln.handovers++
				w.nudge()
				s.mu.Unlock()
				return nil
			}
			w.owner = s.owner()
			s.backInLine(rec.Resource, ln, w)
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		rec, mine = given, false
	}
	err := s.insist(ctx, l.ttl, func(ctx context.Context) error { return s.locker.Release(ctx, rec) })
	if !mine && (isVerdict(err)) {
		return nil
	}
	return err
}

// nextInLine takes the first waiter out of the line. It returns nil if there is none, if it is asking by itself already (the remnant of a
// TryLock that came between), or if it is time to let other processes have a go.
func (s *Session) nextInLine(resource string) *waiter {
	s.mu.Lock()
	defer s.mu.Unlock()
	ln := s.lines[resource]
	if ln == nil || len(ln.waiters) == 0 || ln.waiters[0].asking || s.closed {
		return nil
	}
	switch {
	case ln.handovers == 0:
		ln.since = time.Now()
	case ln.handovers >= streakCount && time.Since(ln.since) > streakTime:
		ln.handovers, ln.pause = 0, time.Now().Add(streakPause)
		return nil
	}
	w := ln.waiters[0]
	ln.waiters = ln.waiters[1:]
	return w
}

// backInLine puts w, who may have got the lock under its owner, in front again. s.mu is held.
func (s *Session) backInLine(resource string, ln *line, w *waiter) {
	if w.gone {
		s.giveBack(resource, w.owner, w.config.ttl)
		return
	}
	w.unknown = true
	ln.waiters = slices.Insert(ln.waiters, 0, w)
	w.nudge()
}
