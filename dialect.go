package locker

import (
	"context"
	"database/sql"
)

// Dialect is what a Table needs to know of a database: a page of SQL, no policy. Validation, retries, time-outs and verdicts live
// once, in Table. A third party can write a dialect for another engine and prove it with lockertest.Run; the example of this type
// is a small one that passes it.
//
// What the statements must keep true, whoever else is at the row at the same time:
//
//   - each verb is one statement, judged by one clock, which is the database's;
//   - a lock's row is the only thing that decides: claim it where expires_at <= now or it is the same owner's, change it where it
//     is the very grant that is named (owner and token) and expires_at > now;
//   - a grant sets acquired_at = greatest(acquired_at + 1 µs, now), which is the token; nothing else touches acquired_at;
//   - expires_at is always now + ttl, with now read as late as the engine allows: after a wait for the row, not before it;
//   - a release keeps the row (owner empty, expires_at in the past), so that it remembers the token.
type Dialect interface {
	// Name is a word for messages, such as "postgres".
	Name() string
	// Quote returns ident, one part of a table's name, as a quoted identifier that means exactly ident.
	Quote(ident string) string
	// Statements returns the SQL for table, which is quoted already.
	Statements(table string) Statements
	// Retryable reports whether err says that a statement did nothing and may be sent again: a deadlock victim, a serialization
	// failure, a busy file.
	Retryable(err error) bool
}

// Checker is an optional interface of a Dialect. CreateTable calls it last; an error says what in the set-up would break a promise
// and what to change.
type Checker interface {
	Check(ctx context.Context, db *sql.DB, table string) error
}

// Statements is the SQL of a Dialect.
//
// Parameters are written as :name, which sqlx binds (write CAST(x AS y) for x::y, since "::" means a colon):
//
//	:resource :owner  what to lock and for whom
//	:token            which grant; 0 is any grant of :owner
//	:next             the owner that Handover gives the lock to
//	:ttl :idle        microseconds
//	:now              the clock of this process, microseconds since 1970, read for each attempt; only for an engine on the same
//	                  host that has no clock as fine as a microsecond
//	:after :limit     a page by name
//	:list             JSON: of RenewBatch and GetBatch [{"resource","owner","token"},…] sorted by resource, each once; of Purge
//	                  ["resource",…]
//
// Rows come back with the columns resource, owner, acquired, expires and now, the times as microseconds since 1970 (integers, so
// that no driver option or time zone can bend them), in any order. A statement that answers with the row in the way, instead of no
// row, adds the column refused (boolean).
type Statements struct {
	Bind    int  // how the driver writes parameters: sqlx.DOLLAR, sqlx.QUESTION, sqlx.AT
	Prepare bool // keep prepared statements, because the driver does not cache them by itself

	// Exec: the engine cannot return rows from an UPDATE. Then the LastInsertId of Acquire, Renew, Handover and RenewBatch is the
	// answer, see ExecRefused, and the rows that Release affected.
	Exec bool
	// ReadFirst: send Get before Acquire and claim only what looked free, because even a refused claim would lock more than a row.
	ReadFirst bool

	Create   []string // CREATE TABLE IF NOT EXISTS
	Acquire  string   // :resource :owner :ttl → the grant, or the row in the way, or nothing (then Get decides)
	Renew    string   // :resource :owner :token :ttl → the row renewed, or the row in the way, or nothing
	Release  string   // :resource :owner :token → the row freed, or the row in the way, or nothing
	Handover string   // :resource :owner :token :next :ttl → a new grant for :next, or the row in the way, or nothing
	Get      string   // :resource → the row, live or not
	List     string   // :after :limit → live rows by name
	Idle     string   // :after :limit :idle → resource of rows with expires_at <= now and acquired_at < now − idle, by name
	Purge    string   // :list :idle → deletes those of the list of which that still holds

	// Optional. Guard is sent in a caller's transaction and keeps others from changing the row until that ends; it must change the row
	// where the nodes of a cluster do not see one another's locks. It returns the row, or with Exec affects it, if it is the very
	// grant and expires_at > now; else it returns the row in the way, or nothing.
	Guard string // :resource :owner :token

	// Optional; "" falls back to one by one.
	RenewBatch string // :list :ttl → the rows renewed; must skip rows that others have locked
	GetBatch   string // :list → the rows; with Exec, says which of a RenewBatch were renewed

	// Of a RowDialect only, which fills in Acquire, Renew, Release, Handover, Get and, as it can, Guard, RenewBatch and GetBatch. There
	// acquired is when the row was locked, 0 for NULL, and expires is that + :ttl; Guard always returns rows; LastInsertId
	// of Renew too is the new acquired; and with Exec RenewBatch is two statements in one transaction, GetBatch, which locks those of
	// :list that are live, skips those that others have locked, and returns them; and then RenewBatch, which sets acquired of each in
	// :list to its token.
	Key    string // how a key is written: KeyInteger, KeyUnsigned, KeyUUID or KeyText
	Finish string // :set :resource :owner :token: sets :set, which is a placeholder of text, and frees the row if it is the grant's
	Lock   string // keeps others from writing: sent before Acquire, in one transaction, by an engine whose :now must be read after the wait
}

// What the LastInsertId of an Exec statement says. 0: there is no such row; of Acquire also that the engine does not report a fresh
// insert, and Get decides. Any other number is the new acquired_at (Acquire, Handover) or the new expires_at (Renew, RenewBatch) in
// microseconds.
const (
	ExecRefused = 1       // the row is in the way
	ExecMoved   = 1 << 62 // this bit is added to an acquired_at that is not now but the one before + 1 µs: Get has the rest
)
