package locker

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"
)

// DefaultTable is the name of the lock table unless WithTable sets another.
const DefaultTable = "distributed_locks"

// Table is a Locker on one table of a database. It keeps no state but prepared statements: any number of Tables, in any number of
// processes, may share the rows.
//
// The pool stays the caller's. A pool that the application has drained cannot renew a lease in time: give locks a small pool of
// their own (two connections do) where the application's may run dry.
//
// A statement that the database says did nothing (a deadlock, a serialization failure, a busy file) is sent again, jittered, until
// ctx ends: with no deadline, and a file that stays locked, that is for ever. All other errors are returned as they come.
//
// A Table is safe for concurrent use.
type Table struct{ store }

var (
	_ Locker       = (*Table)(nil)
	_ BatchRenewer = (*Table)(nil)
	_ Handoverer   = (*Table)(nil)
	_ Admin        = (*Table)(nil)
	_ Pinger       = (*Table)(nil)
)

// Option configures a Table or a RowTable.
type Option interface{ applyStore(*store) error }

type storeOption func(*store) error

func (o storeOption) applyStore(t *store) error { return o(t) }

// WithTable sets the table's name: "locks" or "schema.locks" (in SQLite the schema is an attached database). It is taken as it
// is written, case included, whatever characters it has; a part that contains a dot is put in double quotes, and a quote inside
// those is doubled: `"odd.schema".locks`.
func WithTable(name string) Option {
	return storeOption(func(t *store) (err error) {
		if t.moving {
			return &InvalidError{"table", "is set by RowSpec.Table; WithTable is for New"}
		}
		t.name = name
		t.quoted, err = quoteTable(t.dialect, name)
		return err
	})
}

// WithClockSkew sets the margin: how far the database's clock may jump forward during a lease, or the nodes of a cluster differ. A
// Session stops trusting a lease that much before it ends. Default: a tenth of the TTL. A TTL must be at least twice as long.
func WithClockSkew(d time.Duration) Option {
	return storeOption(func(t *store) error {
		if d <= 0 {
			return &InvalidError{"clock skew", fmt.Sprintf("is %v; it must be more than 0", d)}
		}
		t.skew = d
		return nil
	})
}

// New returns a Table in db. Nothing is sent: the table may be created later, by CreateTable, by a migration with DDL, or by hand.
func New(db *sql.DB, d Dialect, opts ...Option) (*Table, error) {
	t := &Table{}
	if err := t.open(db, d, append([]Option{WithTable(DefaultTable)}, opts...)); err != nil {
		return nil, err
	}
	t.st = d.Statements(escapeColons(t.quoted))
	if err := t.compile("Acquire", "Renew", "Release", "Handover", "Get", "List", "Idle", "Purge"); err != nil {
		return nil, err
	}
	return t, nil
}

// DDL returns the statements of CreateTable as text, for a migration.
func (t *Table) DDL() string {
	return unescapeColons(strings.Join(t.st.Create, ";\n")) + ";\n"
}

// CreateTable creates the table if it is not there. It is idempotent, safe when many processes start at once, and needs no more
// than the right to read it if it is there. It returns an error for a table or a pool that could not keep the promises.
func (t *Table) CreateTable(ctx context.Context) error {
	// Of two sessions that create one table at the same time one may fail, in ways that differ by engine. So what counts is whether
	// the table can be read afterwards.
	const tries = 5
	var created error
	for n := 0; ; n++ {
		err := t.Ping(ctx)
		if err == nil {
			break
		}
		if n == tries || ctx.Err() != nil {
			return cmp.Or(created, err)
		}
		for _, s := range t.st.Create {
			created = t.retry(ctx, "create table", t.name, func() error {
				_, err := t.db.ExecContext(ctx, unescapeColons(s))
				return err
			})
			if created != nil {
				break
			}
		}
		pause(ctx, n)
	}
	if c, ok := t.dialect.(Checker); ok {
		if err := c.Check(ctx, t.db.DB, t.quoted); err != nil {
			return fmt.Errorf("locker: table %q: %w", t.name, err)
		}
	}
	return nil
}

// Acquire claims resource for owner, see Locker. On a Table, a fixed owner excludes nobody who uses the same.
func (t *Table) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (Record, error) {
	if err := CheckName("resource", resource); err != nil {
		return Record{}, err
	}
	if err := CheckName("owner", owner); err != nil {
		return Record{}, err
	}
	ttl, err := CheckTTL(ttl)
	if err != nil {
		return Record{}, err
	}
	p := params{resource: resource, owner: owner, ttl: ttl.Microseconds()}
	return t.grant(ctx, "acquire", resource, ttl, func(*row) (row, error) { return t.claim(ctx, p) })
}

// Renew prolongs the grant that rec names, see Locker. Token 0 renews any grant of the owner.
func (t *Table) Renew(ctx context.Context, rec Record, ttl time.Duration) (Record, error) {
	if err := CheckGrant(rec); err != nil {
		return Record{}, err
	}
	ttl, err := CheckTTL(ttl)
	if err != nil {
		return Record{}, err
	}
	p := params{resource: rec.Resource, owner: rec.Owner, token: rec.Token, ttl: ttl.Microseconds()}
	return t.grant(ctx, "renew", rec.Resource, ttl, func(*row) (row, error) {
		return t.change(ctx, t.renew, p, rec.Owner)
	})
}

// Handover gives the grant that rec names to owner, see Handoverer.
func (t *Table) Handover(ctx context.Context, rec Record, owner string, ttl time.Duration) (Record, error) {
	if err := CheckGrant(rec); err != nil {
		return Record{}, err
	}
	if err := CheckName("owner", owner); err != nil {
		return Record{}, err
	}
	ttl, err := CheckTTL(ttl)
	if err != nil {
		return Record{}, err
	}
	p := params{resource: rec.Resource, owner: rec.Owner, token: rec.Token, next: owner, ttl: ttl.Microseconds()}
	return t.grant(ctx, "hand over", rec.Resource, ttl, func(given *row) (row, error) {
		if given != nil {
			return t.prolongGiven(ctx, given, p)
		}
		return t.change(ctx, t.handover, p, owner)
	})
}

// Release frees the grant that rec names, see Locker. Token 0 frees any grant of the owner. The row stays, for its token.
func (t *Table) Release(ctx context.Context, rec Record) error {
	if err := CheckGrant(rec); err != nil {
		return err
	}
	return t.free(ctx, rec)
}

// Get reads a live lock, see Locker. Do not decide on it that a lock is free: acquire it.
func (t *Table) Get(ctx context.Context, resource string) (Record, error) {
	if err := CheckName("resource", resource); err != nil {
		return Record{}, err
	}
	return t.look(ctx, resource)
}

// RenewBatch renews many grants, a thousand in a statement, see BatchRenewer. Every record must have its token.
func (t *Table) RenewBatch(ctx context.Context, recs []Record, ttl time.Duration) ([]Record, error) {
	ttl, err := CheckTTL(ttl)
	if err != nil {
		return nil, err
	}
	for _, r := range recs {
		if err := CheckGrant(r); err != nil {
			return nil, err
		}
		if r.Token == 0 {
			return nil, &InvalidError{"token", fmt.Sprintf("is 0 for %q; a batch renews exact grants", r.Resource)}
		}
	}
	return t.renewAll(ctx, recs, ttl, func(ctx context.Context, rec Record) (Record, error) { return t.Renew(ctx, rec, ttl) })
}

// List returns live locks by name, see Admin.
func (t *Table) List(ctx context.Context, after string, limit int) ([]Record, error) {
	if limit < 1 {
		return nil, &InvalidError{"limit", fmt.Sprintf("is %d; it must be at least 1", limit)}
	}
	if err := checkText("after", after); err != nil {
		return nil, err
	}
	var recs []Record
	err := t.retry(ctx, "list", t.name, func() error {
		begin := time.Now()
		rows, err := t.query(ctx, t.list, params{after: after, limit: int64(limit)})
		took := time.Since(begin)
		recs = make([]Record, len(rows))
		for i := range rows {
			recs[i] = rows[i].record(took)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return recs, nil
}

// ForceRelease frees resource and returns whom it evicted, see Admin. It is for operators: the evicted holder goes on working until
// its next renewal tells it.
func (t *Table) ForceRelease(ctx context.Context, resource string) (Record, error) {
	for {
		holder, err := t.Get(ctx, resource)
		if err != nil {
			return Record{}, err
		}
		// Only the grant that was read is freed, so the record returned is the one that was evicted.
		err = t.free(ctx, holder)
		switch {
		case err == nil:
			return holder, nil
		case !isVerdict(err):
			return Record{}, err
		}
	}
}

// Purge deletes rows that have been free or expired, and were acquired for the last time more than idle ago, in small batches. It
// returns how many. A row whose token lies in the future is kept, whatever idle says, because the token of a new row could not be
// higher. For the same reason idle must be longer than an acquire may have to wait inside the server: hours, not seconds.
func (t *Table) Purge(ctx context.Context, idle time.Duration) (int64, error) {
	if idle < 0 || idle > MaxTTL {
		return 0, &InvalidError{"idle", fmt.Sprintf("is %v; it must be from 0 to ten years", idle)}
	}
	var total int64
	p := params{idle: idle.Microseconds(), limit: maxBatch}
	for {
		var n int
		err := t.retry(ctx, "purge", t.name, func() error {
			rows, err := t.query(ctx, t.idle, p)
			if n = len(rows); err != nil || n == 0 {
				return err
			}
			names := make([]string, n)
			for i, r := range rows {
				names[i] = r.Resource
			}
			p.list = toJSON(names)
			res, err := t.exec(ctx, t.purge, p)
			if err != nil {
				return err
			}
			deleted, err := res.RowsAffected()
			total += deleted
			p.after = names[n-1]
			return err
		})
		if err != nil || n < maxBatch {
			return total, err
		}
	}
}

// Ping returns nil if the table can be read.
func (t *Table) Ping(ctx context.Context) error {
	return t.retry(ctx, "ping", t.name, func() error {
		_, err := t.read(ctx, "")
		return err
	})
}
