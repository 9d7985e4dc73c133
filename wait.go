package locker

import (
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
	seen    Record // the holder that the first in line saw last

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
	case ln.holder == nil:
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
	s.mu.Lock()
	owner := s.owner()
	err = s.refusal(resource, nil)
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	margin, _ := s.margin(c.ttl)
	ctx, cancel := context.WithTimeout(ctx, c.ttl-margin) // later, the grant would be of no use
	defer cancel()
	begin := time.Now()
	rec, err := s.locker.Acquire(ctx, resource, owner, c.ttl)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		if l := s.adopt(rec, begin, c, inDo); l != nil {
			return l, nil
		}
		if s.closed {
			return nil, closedError(resource)
		}
		return nil, fmt.Errorf("locker: lock %q: the answer took longer than the lease of %v can be trusted", resource, c.ttl)
	}
	if !errors.Is(err, ErrHeld) && !errors.Is(err, ErrInvalid) {
		s.giveBack(resource, owner)
	}
	return nil, err
}

func closedError(resource string) error {
	return fmt.Errorf("locker: lock %q: %w", resource, ErrClosed)
}

// refusal is why resource cannot be asked for now without asking the database, or nil. w is the waiter who asks, if he is in line. s.mu
// is held.
func (s *Session) refusal(resource string, w *waiter) error {
	if s.closed {
		return closedError(resource)
	}
	ln := s.lines[resource]
	switch {
	case ln == nil:
		return nil
	case ln.holder != nil:
		return &HeldError{ln.holder.now()}
	case len(ln.waiters) > 0 && ln.waiters[0] != w && ln.seen.Owner != "":
		return &HeldError{ln.seen}
	}
	return nil
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
	s.mu.Unlock()

	l, err := s.wait(ctx, resource, ln, w)

	s.mu.Lock()
	defer s.mu.Unlock()
	w.gone = true
	if i := slices.Index(ln.waiters, w); i >= 0 {
		ln.waiters = slices.Delete(ln.waiters, i, i+1)
		if i == 0 {
			s.next(resource, ln)
		}
	}
	if l == nil && w.lease != nil { // handed over at the last moment
		return w.lease, nil
	}
	if l == nil && w.unknown {
		s.giveBack(resource, w.owner)
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
		first := len(ln.waiters) > 0 && ln.waiters[0] == w
		mayAsk := first && ln.holder == nil
		delay := time.Until(ln.pause)
		var watch *Record // wake up when this one lets go
		if w.lease != nil {
			defer s.mu.Unlock()
			return w.lease, nil
		}
		if refused := s.refusal(resource, w); refused != nil {
			last = refused
		}
		w.asking = mayAsk && delay <= 0 && ctx.Err() == nil && !s.closed
		asking := w.asking
		s.mu.Unlock()

		switch {
		case errors.Is(last, ErrClosed):
			return nil, last
		case ctx.Err() != nil && !asking:
			return nil, &waitError{resource, ctx.Err(), last}
		case !mayAsk:
			delay = -1 // until woken
		case asking:
			l, err := s.ask(ctx, resource, w, asked)
			if l != nil {
				return l, nil
			}
			asked = true
			var held *HeldError
			switch {
			case errors.As(err, &held):
				s.mu.Lock()
				ln.seen = held.Holder
				s.mu.Unlock()
				delay = held.Holder.Remaining + time.Millisecond
				if !early {
					watch = &held.Holder
				}
			case isPermanent(err):
				return nil, err
			case err == nil:
				continue // granted too late to be trusted: at once again
			default:
				delay = lastPoll
				if !warned {
					s.log.Warn("locker: lock cannot be asked for, trying on", "resource", resource, "error", err)
					warned = true
				}
			}
			last = err
			delay = min(delay, poll/2+rand.N(poll/2))
			poll = min(2*poll, lastPoll)
		}
		woken := s.sleep(ctx, w, delay, watch)
		early = woken && watch != nil // do not spin on wake-ups that come too early
		if woken {
			poll = firstPoll
		}
	}
}

// ask acquires resource for w once; if w has asked before, it looks first. Neither a lease nor an error: the grant came too late to be
// trusted.
func (s *Session) ask(ctx context.Context, resource string, w *waiter, look bool) (l *Lease, err error) {
	ctx, cancel := context.WithTimeout(ctx, w.config.ttl/3+time.Millisecond) // then a fresh connection is tried
	defer cancel()
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
	case errors.Is(err, ErrHeld), errors.Is(err, ErrInvalid):
		w.unknown = false
	default:
		w.unknown = w.unknown || sent
	}
	return l, err
}

// sleep waits for d (d < 0: for ever), for watch to let go, a wake-up, the end of ctx or of the session. It reports whether it was woken.
func (s *Session) sleep(ctx context.Context, w *waiter, d time.Duration, watch *Record) bool {
	var timer <-chan time.Time
	if d >= 0 {
		timer = time.After(d)
	}
	var free chan struct{}
	if waiter, ok := s.locker.(Waiter); ok && watch != nil {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		free = make(chan struct{})
		go func() {
			if waiter.WaitFree(ctx, *watch) == nil {
				close(free)
			}
		}()
	}
	select {
	case <-timer:
		return false
	case <-free:
	case <-w.wake:
	case <-ctx.Done():
	case <-s.closing:
	}
	return true
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
		begin := time.Now()
		attempt, cancel := context.WithTimeout(ctx, max(l.ttl/6, 100*time.Millisecond))
		given, err := hand.Handover(attempt, rec, w.owner, w.config.ttl)
		cancel()
		s.mu.Lock()
		ln := s.line(rec.Resource)
		if err != nil {
			s.backInLine(rec.Resource, ln, w)
			s.mu.Unlock()
			if mine && (errors.Is(err, ErrNotHeld) || errors.Is(err, ErrNotOwner)) {
				return err
			}
			// The answer was lost. If w has the lock now, it finds that out by its owner; if not, this frees it.
			err = s.insist(ctx, l.ttl, func(ctx context.Context) error { return s.locker.Release(ctx, rec) })
			if errors.Is(err, ErrNotHeld) || errors.Is(err, ErrNotOwner) {
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
	if !mine && (errors.Is(err, ErrNotHeld) || errors.Is(err, ErrNotOwner)) {
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
		s.giveBack(resource, w.owner)
		return
	}
	w.unknown = true
	ln.waiters = slices.Insert(ln.waiters, 0, w)
	w.nudge()
}
