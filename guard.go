package locker

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
)

// Tx is a transaction of database/sql or sqlx: what Guard needs, and what a pool, which would commit each statement by itself, does
// not have.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	Commit() error
	Rollback() error
}

var _ Tx = (*sql.Tx)(nil)

// Guard makes a lease more than advisory for data in the same database: it checks, in the caller's transaction, that rec is the live
// grant by the database's clock, and keeps claimers (not readers) out until the transaction ends. So the writes of the transaction
// are committed while nobody else has been granted the lock, or Guard fails:
//
//	tx, err := db.BeginTx(ctx, nil) // after the lock was acquired
//	…                               // write
//	err = table.Guard(ctx, tx, lease.Record())
//	…                               // an error: roll back, and nothing was written
//	err = tx.Commit()
//
// The error is a *LostError (errors.Is ErrLost) if the grant is over. Any other error says nothing about the lease and comes as the
// driver gave it, wrapped: roll back. Those that mean "once more", here or from another statement or the commit (SQLSTATE 40001 and
// 40P01; 1213, 1205 and 1020 in MySQL and MariaDB; 5 and 517 in SQLite), are what Retryable of the dialect reports; then send the whole
// transaction again while the lease lasts. The example has the loop.
//
// Where to put it:
//
//   - PostgreSQL and MySQL at READ COMMITTED, MySQL at REPEATABLE READ: last, right before the commit, because renewals of this lease
//     wait for the transaction. Guard itself reads the newest row whatever the snapshot of the transaction is; reads before it at
//     REPEATABLE READ are as old as the transaction's first, so begin it after the acquire.
//   - PostgreSQL above READ COMMITTED, and MariaDB with innodb_snapshot_isolation (the default from 11.6): first. Else a renewal that
//     came after the snapshot makes it fail, 40001 or 1020, each time.
//   - SQLite: first, in a transaction that begins IMMEDIATE (_txlock=immediate). A deferred one that has read something cannot become
//     a writer once another has written (517, whatever busy_timeout says); with a rollback journal it keeps all writers out, this
//     lease's renewals included.
//
// Keep the transaction shorter than the trust of the lease: its renewals wait for it, those of other leases do not (in SQLite all writers
// of the file do). Several Guards in one transaction go in the order of their names, or two such transactions may deadlock. A rollback
// to a savepoint set before Guard undoes it. The transaction must be in the table's database, through any pool. On a Galera cluster,
// where claimers do not wait, the loser of the two learns at its statement or its COMMIT (1213).
func (t *Table) Guard(ctx context.Context, tx Tx, rec Record) error {
	if err := CheckGrant(rec); err != nil {
		return err
	}
	return t.check(ctx, tx, rec)
}

// check sends the guard statement once. What the database says of a conflict is the transaction's business.
func (t *store) check(ctx context.Context, tx Tx, rec Record) error {
	switch v := reflect.ValueOf(tx); {
	case !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil():
		return &InvalidError{"tx", "is nil"}
	case rec.Token == 0:
		return &InvalidError{"token", fmt.Sprintf("is 0 for %q; a guard checks an exact grant", rec.Resource)}
	case t.guard == nil:
		return &InvalidError{"dialect", fmt.Sprintf("%s has no Guard statement", t.dialect.Name())}
	}
	p := t.params(rec)
	ok, rows, err := t.sendGuard(ctx, tx, p)
	if err == nil && !ok && len(rows) == 0 {
		rows, err = scan(tx.QueryContext(ctx, t.get.text, t.get.args(&p)...)) // why
	}
	switch {
	case err != nil:
		if noTable(err) {
			err = fmt.Errorf("%w (is the transaction in the database of %s?)", err, t.name)
		}
		return t.failed(ctx, "guard", rec.Resource, err)
	case ok:
		return nil
	}
	cause := t.verdict(append(rows, row{})[0], p)
	if errors.Is(cause, errAgain) { // ended this instant, or seen in an old snapshot
		cause = ErrNotHeld
	}
	return &LostError{Lease: rec, Err: cause}
}

func (t *store) sendGuard(ctx context.Context, tx Tx, p params) (ok bool, inTheWay []row, err error) {
	if t.st.Exec && !t.moving {
		res, err := tx.ExecContext(ctx, t.guard.text, t.guard.args(&p)...)
		if err != nil {
			return false, nil, err
		}
		n, err := res.RowsAffected()
		return n == 1, nil, err
	}
	rows, err := scan(tx.QueryContext(ctx, t.guard.text, t.guard.args(&p)...))
	return len(rows) == 1 && !rows[0].Refused, rows, err
}
