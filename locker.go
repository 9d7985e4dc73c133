// Package locker locks things in the SQL database a service already has: PostgreSQL, MySQL, MariaDB or SQLite.
//
// A lock is a row. Whoever holds it has a lease: ownership for a time (the TTL), renewed while the work goes on, free again by
// itself when the holder dies. No connection is pinned and no transaction is open while the work runs.
//
//	table, err := locker.New(db, locker.Postgres())
//	session, err := locker.NewSession(table)
//	err = session.Do(ctx, "invoice:7", func(ctx context.Context, lease *locker.Lease) error {
//		return charge(ctx, lease.Token()) // ctx ends before the lease does
//	})
//
// # Session
//
// A [Session] is what most programs want. It keeps the leases of one process alive with one heartbeat, waits in line, gives every
// acquire an owner of its own and ends a lease's context in time. One lease goes through these states:
//
//	          granted             renewed, a third of the TTL at a time
//	waiting ───────────▶ trusted ◀──────────────────────────────┐
//	                        │  └────────────────────────────────┘
//	         Release        │        forced, stolen, or no answer until trust ends
//	released ◀──────────────┴──────────────▶ lost (its context ends, cause *LostError)
//
//	request sent      trust ends     lease ends (database clock)
//	─────┬────────────────┬───────────────┬──▶
//	     └── TTL − margin ┘└── margin ────┘
//
// Trust counts from before the request was sent, so the way to the database only ever shortens it. The margin
// ([WithClockSkew], a tenth of the TTL by default) covers what clocks may differ by.
//
// # Table
//
// A [Table] has the raw verbs, each one atomic statement judged by the database's clock: Acquire, Renew, Release and Get. Raw
// Acquire with a fixed owner, such as a host name, excludes nobody inside that host: the same owner is granted again. Use an owner
// for each acquire, or a Session, which does that.
//
// # Row leases
//
// A [RowTable] keeps the lock on the row that it protects: a nullable timestamp column, such as users.identity_locked_at, and no table of
// its own. It is a Locker like a Table, and a Session works on it unchanged; what is different (one TTL for all, tokens that move with
// each renewal, ErrNoRow) stands in its documentation. [RowTable.Finish] completes the work and frees the row in one statement.
//
//	rows, err := locker.NewRowTable(ctx, db, locker.Postgres(), locker.RowSpec{
//		Table: "users", Key: "id", LockedAt: "identity_locked_at", Owner: "identity_locked_by", TTL: 30 * time.Second,
//	})
//
// # Guard
//
// For data in the same database a lease is more than advisory: [Table.Guard] and [RowTable.Guard] check it inside the caller's own
// transaction and keep claimers out until that ends, so that a stale holder's write cannot be committed. For data elsewhere send the
// token along ([Lease.Token]) and let the other side refuse a token lower than the highest it has seen.
//
// # What is promised
//
//   - At most one owner per resource at any instant of the database's clock. No clock of a client takes part.
//   - A dead holder blocks nobody for longer than its TTL.
//   - A holder learns in time that it lost its lease, even if the database hangs.
//   - Every grant has a fencing token ([Record.Token]), strictly increasing per resource over releases, steals, purges and
//     restarts; and over lost or deleted rows as long as the clock is past the last token.
//
// # What is assumed
//
// The database's clock does not jump forward, and the nodes of a cluster do not differ, by more than the margin. If it is set back
// by S, a dead holder blocks for TTL + S. A lease is a lease: a process that was stopped for longer than its trust may wake up
// inside its critical section, see no signal for an instant and write (Kleppmann, "How to do distributed locking", 2016). So without
// Guard or a checked token a lease saves work and no more; with one of them it is safe.
package locker

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"
)

// Locker is the one interface: four verbs on plain data. Each is one attempt and none waits for a holder to let go.
//
// An error that is none of the sentinels below (a dropped connection, an ended context) leaves the outcome unknown: the statement
// may have taken effect. Every verb may be sent again with the same arguments: the same owner acquires again, a renewal finds
// owner and token, a second release finds nothing of its own. An error that has a method Permanent() bool which returns true (no table,
// no privilege) says that this will not help until somebody changes the set-up; a Session stops waiting at one.
//
// Implementations are safe for concurrent use.
type Locker interface {
	// Acquire claims resource for owner for ttl if it is free, expired, or already owner's (a new grant, a new token). Held by
	// another: *HeldError (errors.Is ErrHeld), which says who and for how long, and nothing was written.
	Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (Record, error)

	// Renew gives the grant that rec names (resource, owner and token) a full ttl from now and returns the record to use from now
	// on. It never re-creates and never steals: ErrNotHeld if the lease expired, was released or is gone; ErrNotOwner if another
	// owner, or a newer grant, has it. On a Table owner, token and AcquiredAt stay; on a RowTable the token moves, and AcquiredAt with it.
	Renew(ctx context.Context, rec Record, ttl time.Duration) (Record, error)

	// Release frees the grant that rec names: ErrNotHeld or ErrNotOwner as in Renew, and then nothing has changed.
	Release(ctx context.Context, rec Record) error

	// Get reads a live lock. Free, expired and never seen are all ErrNotHeld.
	Get(ctx context.Context, resource string) (Record, error)
}

// BatchRenewer is an optional interface of a Locker: many renewals in one request. Without it a Session renews one by one.
type BatchRenewer interface {
	// RenewBatch renews what it can of recs, as Renew does, and returns the new records in any order. A record that is not among
	// them is not judged: renew it singly to learn why. It does not wait for a row that another session has locked. With an error,
	// renewed holds what was renewed before it, and the rest is unknown.
	RenewBatch(ctx context.Context, recs []Record, ttl time.Duration) (renewed []Record, err error)
}

// Handoverer is an optional interface of a Locker: a release and the next owner's acquire in one request. Without it a Session
// releases and the next in line acquires.
type Handoverer interface {
	// Handover ends the grant that rec names and gives owner a new one, with a higher token, at the same instant. ErrNotHeld or
	// ErrNotOwner as in Release, and then nothing has changed.
	Handover(ctx context.Context, rec Record, owner string, ttl time.Duration) (Record, error)
}

// Waiter is an optional interface of a Locker: a wake-up for those who wait. Without it a Session polls.
type Waiter interface {
	// WaitFree returns nil when held may have become free, or ctx's error. It may return early; the caller looks again.
	WaitFree(ctx context.Context, held Record) error
}

// Admin is an optional interface of a Locker, for operators and tools.
type Admin interface {
	// List returns up to limit live locks whose names are greater than after, in byte order of their names. A page with fewer than
	// limit locks is the last one.
	List(ctx context.Context, after string, limit int) ([]Record, error)
	// ForceRelease frees resource whoever holds it and returns whom it evicted; ErrNotHeld if nobody does. The evicted holder's
	// next renewal answers ErrNotHeld.
	ForceRelease(ctx context.Context, resource string) (Record, error)
}

// Pinger is an optional interface of a Locker: Ping returns nil if locks can be read now.
type Pinger interface {
	Ping(ctx context.Context) error
}

// The verdicts. Match them with errors.Is; the errors that are returned wrap them with the resource's name.
var (
	ErrHeld     = errors.New("held by another owner")
	ErrNotHeld  = errors.New("not held (any more)")
	ErrNotOwner = errors.New("held by another owner or a newer grant")
	ErrNoRow    = errors.New("there is no such row") // of a RowTable, whose locks are rows that the application makes
	ErrLost     = errors.New("lease lost")
	ErrClosed   = errors.New("session is closed")
	ErrInvalid  = errors.New("invalid argument")
)

// InvalidError says which argument is wrong. It is returned before anything is sent. errors.Is ErrInvalid.
type InvalidError struct {
	Field  string // "resource", "owner", "ttl", …
	Reason string
}

func (e *InvalidError) Error() string { return fmt.Sprintf("locker: %s %s", e.Field, e.Reason) }

// Is reports whether target is ErrInvalid.
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// LostError says that a lease ended before its holder released it, and why. errors.Is ErrLost.
type LostError struct {
	Lease Record // as it was last confirmed
	Err   error  // ErrNotHeld (forced, or expired), ErrNotOwner (stolen), or the last error of the Locker that could not be reached
}

func (e *LostError) Error() string {
	return fmt.Sprintf("locker: lease on %q (token %d) lost: %s", e.Lease.Resource, e.Lease.Token, bare(e.Err))
}

// Is reports whether target is ErrLost.
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Unwrap returns the cause.
func (e *LostError) Unwrap() error { return e.Err }

// The limits, the same for every Locker. They are checked before anything is sent.
const (
	MaxName = 255                       // bytes of a resource or an owner
	MinTTL  = time.Millisecond          // a part of a millisecond rounds up
	MaxTTL  = 10 * 365 * 24 * time.Hour // ten years
)

// CheckName returns nil if name can be a resource or an owner (field says which): 1 to 255 bytes of valid UTF-8 without NUL. Names
// are compared byte for byte: case, accents and trailing spaces count. The error is an *InvalidError.
func CheckName(field, name string) error {
	switch {
	case name == "":
		return &InvalidError{field, "is empty"}
	case len(name) > MaxName:
		return &InvalidError{field, fmt.Sprintf("has %d bytes, more than %d; shorten or hash it", len(name), MaxName)}
	}
	return checkText(field, name)
}

func checkText(field, s string) error {
	if !utf8.ValidString(s) {
		return &InvalidError{field, "is not valid UTF-8"}
	}
	for i := range len(s) {
		if s[i] == 0 {
			return &InvalidError{field, "contains a NUL byte"}
		}
	}
	return nil
}

// CheckTTL returns ttl rounded up to a millisecond if it is from 1 ms to 10 years (0 < ttl < 1 ms rounds up to 1 ms). The error is
// an *InvalidError.
func CheckTTL(ttl time.Duration) (time.Duration, error) {
	switch {
	case ttl <= 0:
		return 0, &InvalidError{"ttl", fmt.Sprintf("is %v; it must be at least %v", ttl, MinTTL)}
	case ttl > MaxTTL:
		return 0, &InvalidError{"ttl", fmt.Sprintf("is %v; it must be at most ten years (%v)", ttl, MaxTTL)}
	}
	return (ttl + time.Millisecond - 1).Truncate(time.Millisecond), nil
}

// CheckGrant returns nil if rec can name a grant in Renew or Release: its names are valid and its token is not negative. The error
// is an *InvalidError.
func CheckGrant(rec Record) error {
	if err := CheckName("resource", rec.Resource); err != nil {
		return err
	}
	if err := CheckName("owner", rec.Owner); err != nil {
		return err
	}
	if rec.Token < 0 {
		return &InvalidError{"token", fmt.Sprintf("is %d; a token is never negative", rec.Token)}
	}
	return nil
}
