package locker

import (
	"fmt"
	"time"
)

// Record is what a lock's row said at one moment. It is a value: a copy is as good as the original, and a handle can be rebuilt on
// another host from Resource, Owner and Token.
type Record struct {
	Resource string
	Owner    string

	// Token is the fencing token of this grant: the microseconds since 1970 at which it was made, moved up where needed so that it
	// rises strictly per resource. 0 given to Renew or Release of a Table means any grant of this owner; that is for people at a
	// prompt, and nothing in this module sends it by itself.
	Token int64

	AcquiredAt time.Time // when this grant was made, database clock, UTC
	ExpiresAt  time.Time // when the lease ends unless renewed, database clock, UTC

	// Remaining is the time left when the call returned, never more than that: what a client may count down with its own
	// monotonic clock. From Acquire and Renew it is the ttl minus what the request took. 0: over, or too close to tell.
	Remaining time.Duration
}

// IsExpired reports whether the lease is over at now, an instant of the database's clock. Compare with a local clock only for
// display; a program counts down Remaining.
func (r Record) IsExpired(now time.Time) bool { return !now.Before(r.ExpiresAt) }

// HeldError is the answer to an acquire of a resource that another owner holds. errors.Is ErrHeld.
type HeldError struct {
	Holder Record // who holds it (Owner is empty where a RowTable has no column for it), and for how long (Remaining)
}

func (e *HeldError) Error() string {
	by := ""
	if e.Holder.Owner != "" { // a RowTable may not know
		by = fmt.Sprintf(" by %q", e.Holder.Owner)
	}
	return fmt.Sprintf("locker: %q is held%s for another %v", e.Holder.Resource, by, e.Holder.Remaining.Round(time.Millisecond))
}

// Is reports whether target is ErrHeld.
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// row is a row of the lock table with the database's clock beside it, all times in microseconds since 1970.
type row struct {
	Resource string
	Owner    string
	Acquired int64
	Expires  int64
	Now      int64
	Refused  bool
}

func (r *row) live() bool { return r.Expires > r.Now }

// record returns r as of the end of a call that took took: nobody knows when in that time the database looked at its clock, so all
// of it is taken off.
func (r *row) record(took time.Duration) Record {
	return Record{
		Resource:   r.Resource,
		Owner:      r.Owner,
		Token:      r.Acquired,
		AcquiredAt: time.UnixMicro(r.Acquired).UTC(),
		ExpiresAt:  time.UnixMicro(r.Expires).UTC(),
		Remaining:  max(0, micros(r.Expires-r.Now)-took),
	}
}

// micros is n microseconds, or as many as a Duration can say: a row may have been given any expiry by hand.
func micros(n int64) time.Duration {
	const most = int64(1<<63-1) / int64(time.Microsecond)
	return time.Duration(min(n, most)) * time.Microsecond
}
