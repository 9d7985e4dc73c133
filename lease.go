package locker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Lease is a lock that a Session holds and renews. It is safe for concurrent use.
type Lease struct {
	s       *Session
	ttl     time.Duration
	margin  time.Duration
	minHold time.Duration
	begin   time.Time // before the request that was granted

	// Guarded by s.mu.
	rec     Record
	trust   time.Time     // when it ends, on both clocks
	due     time.Time     // when to renew
	busy    chan struct{} // a renewal is under way; closed when it is settled
	ending  chan struct{} // ReleaseWith is under way; closed when it is over
	freed   bool          // by ReleaseWith
	failure error         // of the last renewal, nil if it was confirmed
	ended   error         // what Err says
	lost    *LostError
	cancels map[*context.CancelCauseFunc]struct{} // of the contexts that end with the lease

	release  sync.Once
	released error
}

// Record returns the lease's record as of its last renewal, with Remaining as of now.
func (l *Lease) Record() Record {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	return l.now()
}

func (l *Lease) now() Record {
	rec := l.rec
	rec.Remaining = max(0, time.Until(l.trust.Add(l.margin)))
	return rec
}

// Token returns the fencing token of the lease: send it along with every write that a stale holder must not make. On a RowTable it
// rises with each renewal.
func (l *Lease) Token() int64 { return l.Record().Token }

// TrustedUntil returns when trust in the lease ends unless it is renewed before: a local time that is earlier than the lease's end by
// the margin.
func (l *Lease) TrustedUntil() time.Time {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	return l.trust
}

// Err returns nil while the lease may be trusted. After a loss it is the *LostError, after Release it matches ErrNotHeld, and after
// Session.Close ErrClosed. It looks at the clock itself: it is right even where a signal has had no time to arrive, such as in a
// process that was stopped and goes on.
func (l *Lease) Err() error {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	return l.err()
}

func (l *Lease) err() error {
	if _, held := l.s.leases[l]; held && l.over(time.Now()) {
		l.s.lose(l, l.cause())
	}
	return l.ended
}

// Context returns a context that ends with parent, with cancel, or when the lease may no longer be trusted, which is before it ends
// in the database. context.Cause then says why: *LostError, or as Err does.
func (l *Lease) Context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if err := l.err(); err != nil {
		cancel(err)
		return ctx, func() {}
	}
	if l.cancels == nil {
		l.cancels = make(map[*context.CancelCauseFunc]struct{})
	}
	l.cancels[&cancel] = struct{}{}
	return ctx, func() {
		l.s.mu.Lock()
		delete(l.cancels, &cancel)
		l.s.mu.Unlock()
		cancel(nil)
	}
}

// Release frees the lock, or hands it to the next in line in this process. It is idempotent and gives the same answer each time: nil,
// the *LostError of a lease that was lost, or why the database could not be told; then the TTL frees the lock. It works under a
// cancelled ctx and is bounded: by ten seconds and by the end of the lease. With WithMinHold it leaves the lock to run out instead.
func (l *Lease) Release(ctx context.Context) error {
	l.release.Do(func() { l.released = l.s.release(ctx, l) })
	return l.released
}

// ReleaseWith ends the lease by release, which frees the lock as a part of something else, such as RowTable.Finish or a transaction of the
// caller's:
//
//	err := lease.ReleaseWith(ctx, func(ctx context.Context, rec locker.Record) error {
//		return rows.Finish(ctx, rec, "state = 'paid'")
//	})
//
// release is called once, with the record as it is in the database: no renewal is under way and none is sent until it returns. Its ctx
// ends with ctx and when the lease may no longer be trusted. If it returns nil the lock is free: the lease ends as by Release, which
// then returns nil as well. If its error matches ErrNotHeld, ErrNotOwner or ErrNoRow the lease is lost, and the answer is the
// *LostError. After any other error the lease goes on, renewed and held, and the error is returned as it is. WithMinHold has no part in
// it. release must not call Release of this lease, which would wait for it.
func (l *Lease) ReleaseWith(ctx context.Context, release func(ctx context.Context, rec Record) error) (err error) {
	s := l.s
	s.mu.Lock()
	for {
		ended := l.err()
		if _, held := s.leases[l]; !held {
			s.mu.Unlock()
			return ended
		}
		busy := l.busy
		if busy == nil {
			break
		}
		s.mu.Unlock()
		select {
		case <-busy: // a renewal, at most a sixth of the TTL, or another ReleaseWith
		case <-ctx.Done():
			return ctx.Err()
		}
		s.mu.Lock()
	}
	l.ending = make(chan struct{})
	l.busy = l.ending // the heartbeat keeps out
	s.jobs.n++
	rec := l.now()
	ctx, cancel := context.WithDeadline(ctx, l.trust)
	s.mu.Unlock()

	unknown := true // release may panic
	defer func() {
		cancel()
		s.mu.Lock()
		defer s.mu.Unlock()
		defer s.jobs.done()
		close(l.ending)
		l.busy, l.ending = nil, nil
		_, held := s.leases[l]
		switch {
		case unknown:
		case err == nil:
			l.freed = true
			l.end(fmt.Errorf("locker: lease on %q was released: %w", rec.Resource, ErrNotHeld))
			s.drop(l)
		case isVerdict(err):
			if held {
				s.lose(l, err)
			}
			if l.lost != nil {
				err = l.lost
			}
		}
		s.wake()
	}()
	err = release(ctx, rec)
	unknown = false
	return err
}

// over reports whether trust has ended at now, by either clock. The monotonic one stands still while a machine is suspended, the wall
// clock may be set back; set forward it ends trust early, which costs work but not safety.
func (l *Lease) over(now time.Time) bool {
	return !now.Before(l.trust) || !now.Round(0).Before(l.trust.Round(0))
}

// cause is why trust has ended without a verdict.
func (l *Lease) cause() error {
	if l.failure != nil {
		return l.failure
	}
	return errUnconfirmed
}

var errUnconfirmed = errors.New("no renewal was confirmed in time (the database did not answer, or this process or machine was stopped)")

// end sets what Err says and ends the contexts. s.mu is held.
func (l *Lease) end(err error) {
	if l.ended != nil {
		return
	}
	l.ended = err
	for cancel := range l.cancels {
		(*cancel)(err)
	}
	l.cancels = nil
}

// release frees l once.
func (s *Session) release(ctx context.Context, l *Lease) error {
	s.mu.Lock()
	if ending := l.ending; ending != nil {
		s.mu.Unlock()
		select {
		case <-ending:
		case <-time.After(10 * time.Second):
		}
		s.mu.Lock()
	}
	_, held := s.leases[l]
	if held && l.over(time.Now()) {
		s.lose(l, l.cause())
		held = false
	}
	if l.freed {
		s.mu.Unlock()
		return nil
	}
	if !held {
		defer s.mu.Unlock()
		if !isVerdict(l.lost.Err) {
			s.giveBack(l.rec.Resource, l.rec.Owner, l.ttl) // no verdict: it may be l's still
		}
		return l.lost
	}
	s.jobs.n++ // Close waits
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.jobs.done()
	}()
	delete(s.leases, l) // not renewed any more; the line stays taken until the database has been told
	l.end(fmt.Errorf("locker: lease on %q was released: %w", l.rec.Resource, ErrNotHeld))
	bound := min(max(time.Until(l.trust.Add(l.margin)), time.Second), 10*time.Second)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bound)
	defer cancel()
	hold := l.minHold > time.Since(l.begin)
	busy := l.busy
	if hold && busy != nil { // a renewal that comes after what is sent now would undo it
		s.mu.Unlock()
		select {
		case <-busy:
			busy = nil
		case <-time.After(time.Second):
		}
		s.mu.Lock()
	}
	rec := l.rec
	owner := s.owner()
	s.mu.Unlock()

	var err error
	if hold {
		hand, can := s.locker.(Handoverer)
		err = s.insist(ctx, l.ttl, func(ctx context.Context) (err error) {
			keep := max(l.minHold-time.Since(l.begin), MinTTL)
			if busy != nil && can { // that renewal may come yet, but not for a new grant
				_, err = hand.Handover(ctx, rec, owner, keep)
			} else {
				_, err = s.locker.Renew(ctx, rec, keep)
			}
			return err
		})
	} else {
		err = s.handOver(ctx, l, rec)
		if busy != nil && errors.Is(err, ErrNotOwner) { // or a renewal whose answer is on its way has moved the token
			select {
			case <-busy:
			case <-ctx.Done():
			}
			s.mu.Lock()
			moved := l.rec
			s.mu.Unlock()
			if moved.Token != rec.Token {
				rec = moved
				err = s.handOver(ctx, l, rec)
			}
		}
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if isVerdict(err) {
		l.lost = &LostError{Lease: rec, Err: err}
		l.ended = l.lost
		err = l.lost
	}
	s.drop(l)
	return err
}

// insist repeats a request that did not get an answer, on a fresh connection each time because each has a time-out of its own.
func (s *Session) insist(ctx context.Context, ttl time.Duration, send func(context.Context) error) error {
	for n := 0; ; n++ {
		attempt, cancel := context.WithTimeout(ctx, max(ttl/6, 100*time.Millisecond))
		err := send(attempt)
		cancel()
		switch {
		case err == nil:
			return nil
		case isVerdict(err):
			if n > 0 { // an attempt whose answer was lost has done it
				return nil
			}
			return err
		case isPermanent(err), ctx.Err() != nil:
			return err
		}
		pause(ctx, n+3)
		if ctx.Err() != nil {
			return err
		}
	}
}
