package locker

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jmoiron/sqlx"
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
type Table struct {
	db      *sqlx.DB
	dialect Dialect
	name    string // as it was given, for messages
	quoted  string
	skew    time.Duration
	st      Statements

	acquire, renew, release, get, list, idle, purge, handover, renewBatch, getBatch *statement
}

var (
	_ Locker       = (*Table)(nil)
	_ BatchRenewer = (*Table)(nil)
	_ Handoverer   = (*Table)(nil)
	_ Admin        = (*Table)(nil)
	_ Pinger       = (*Table)(nil)
)

// Option configures a Table.
type Option interface{ applyTable(*Table) error }

type tableOption func(*Table) error

func (o tableOption) applyTable(t *Table) error { return o(t) }

// WithTable sets the table's name: "locks" or "schema.locks" (in SQLite the schema is an attached database). It is taken as it
// is written, case included, whatever characters it has; a part that contains a dot is put in double quotes, and a quote inside
// those is doubled: `"odd.schema".locks`.
func WithTable(name string) Option {
	return tableOption(func(t *Table) (err error) {
		t.name = name
		t.quoted, err = quoteTable(t.dialect, name)
		return err
	})
}

// WithClockSkew sets the margin: how far the database's clock may jump forward during a lease, or the nodes of a cluster differ. A
// Session stops trusting a lease that much before it ends. Default: a tenth of the TTL. A TTL must be at least twice as long.
func WithClockSkew(d time.Duration) Option {
	return tableOption(func(t *Table) error {
		if d <= 0 {
			return &InvalidError{"clock skew", fmt.Sprintf("is %v; it must be more than 0", d)}
		}
		t.skew = d
		return nil
	})
}

// New returns a Table in db. Nothing is sent: the table may be created later, by CreateTable, by a migration with DDL, or by hand.
func New(db *sql.DB, d Dialect, opts ...Option) (*Table, error) {
	if db == nil {
		return nil, &InvalidError{"db", "is nil"}
	}
	if d == nil {
		return nil, &InvalidError{"dialect", "is nil; use Postgres, MySQL or SQLite"}
	}
	t := &Table{db: sqlx.NewDb(db, d.Name()), dialect: d}
	for _, o := range append([]Option{WithTable(DefaultTable)}, opts...) {
		if o == nil {
			return nil, &InvalidError{"option", "is nil"}
		}
		if err := o.applyTable(t); err != nil {
			return nil, err
		}
	}
	// sqlx takes ":" for the start of a parameter, and "::" for a colon.
	t.st = d.Statements(strings.ReplaceAll(t.quoted, ":", "::"))
	for _, s := range []struct {
		to       **statement
		name     string
		text     string
		optional bool
	}{
		{&t.acquire, "Acquire", t.st.Acquire, false},
		{&t.renew, "Renew", t.st.Renew, false},
		{&t.release, "Release", t.st.Release, false},
		{&t.get, "Get", t.st.Get, false},
		{&t.list, "List", t.st.List, false},
		{&t.idle, "Idle", t.st.Idle, false},
		{&t.purge, "Purge", t.st.Purge, false},
		{&t.handover, "Handover", t.st.Handover, false},
		{&t.renewBatch, "RenewBatch", t.st.RenewBatch, true},
		{&t.getBatch, "GetBatch", t.st.GetBatch, !t.st.Exec || t.st.RenewBatch == ""},
	} {
		if s.text == "" && s.optional {
			continue
		}
		c, err := compile(s.text, t.st.Bind, t.st.Prepare)
		if err != nil {
			return nil, fmt.Errorf("locker: statement %s of dialect %s: %w", s.name, d.Name(), err)
		}
		*s.to = c
	}
	return t, nil
}

// quoteTable splits name at its dots, those in double quotes apart, and quotes each part.
func quoteTable(d Dialect, name string) (string, error) {
	invalid := func(reason string) (string, error) {
		return "", &InvalidError{"table", fmt.Sprintf("%q %s", name, reason)}
	}
	if err := checkText("table", name); err != nil {
		return "", err
	}
	var parts []string
	for rest, more := name, true; more; {
		var part string
		if strings.HasPrefix(rest, `"`) {
			end := 1
			for ; end < len(rest); end++ {
				if rest[end] != '"' {
					continue
				}
				if end+1 < len(rest) && rest[end+1] == '"' {
					end++ // a doubled quote
					continue
				}
				break
			}
			if end >= len(rest) {
				return invalid("has a quote that is not closed")
			}
			part, rest = strings.ReplaceAll(rest[1:end], `""`, `"`), rest[end+1:]
			if more = rest != ""; more {
				if rest[0] != '.' {
					return invalid("goes on after a closing quote")
				}
				rest = rest[1:]
			}
		} else {
			part, rest, more = strings.Cut(rest, ".")
		}
		switch {
		case part == "":
			return invalid("has an empty part")
		case len(part) > 63:
			return invalid("has a part of more than 63 bytes, which PostgreSQL would cut")
		}
		parts = append(parts, d.Quote(part))
	}
	if len(parts) > 2 {
		return invalid("has more than two parts; write schema.table")
	}
	return strings.Join(parts, "."), nil
}

// ClockSkew is what WithClockSkew set, or 0 for the default. A Session takes its margin from it.
func (t *Table) ClockSkew() time.Duration { return t.skew }

// DDL returns the statements of CreateTable as text, for a migration.
func (t *Table) DDL() string {
	return strings.ReplaceAll(strings.Join(t.st.Create, ";\n"), "::", ":") + ";\n"
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
				_, err := t.db.ExecContext(ctx, strings.ReplaceAll(s, "::", ":"))
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
	return t.grant(ctx, "acquire", resource, ttl, func() (row, error) {
		begin := time.Now()
		if t.st.ReadFirst {
			seen, err := t.read(ctx, resource)
			if err != nil {
				return row{}, err
			}
			if seen.live() && seen.Owner != owner {
				return row{}, &HeldError{seen.record(time.Since(begin))}
			}
		}
		r, err := t.send(ctx, t.acquire, p, owner)
		if err != nil {
			return row{}, err
		}
		if r.Refused {
			if r.live() && r.Owner != owner {
				return row{}, &HeldError{r.record(time.Since(begin))}
			}
			return row{}, errAgain // the holder came and went in the meantime
		}
		return r, nil
	})
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
	return t.grant(ctx, "renew", rec.Resource, ttl, func() (row, error) {
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
	given := false
	return t.grant(ctx, "hand over", rec.Resource, ttl, func() (row, error) {
		if given { // that took too long to be a full lease: prolong it
			r, err := t.change(ctx, t.renew, p, owner)
			if isVerdict(err) {
				err = fmt.Errorf("given to %q, whose lease is over already: %v", owner, err) // no verdict on rec
			}
			return r, err
		}
		r, err := t.change(ctx, t.handover, p, owner)
		if err == nil {
			given, p.owner, p.token = true, owner, r.Acquired
		}
		return r, err
	})
}

// Release frees the grant that rec names, see Locker. Token 0 frees any grant of the owner. The row stays, for its token.
func (t *Table) Release(ctx context.Context, rec Record) error {
	if err := CheckGrant(rec); err != nil {
		return err
	}
	return t.free(ctx, rec)
}

func (t *Table) free(ctx context.Context, rec Record) error {
	p := params{resource: rec.Resource, owner: rec.Owner, token: rec.Token}
	return t.retry(ctx, "release", rec.Resource, func() error {
		if !t.st.Exec {
			_, err := t.change(ctx, t.release, p, rec.Owner)
			return err
		}
		res, err := t.exec(ctx, t.release, p)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected() // a release always changes the row, so the count is right under clientFoundRows too
		if err != nil || n > 0 {
			return err
		}
		return t.judge(ctx, p)
	})
}

// Get reads a live lock, see Locker. Do not decide on it that a lock is free: acquire it.
func (t *Table) Get(ctx context.Context, resource string) (Record, error) {
	if err := CheckName("resource", resource); err != nil {
		return Record{}, err
	}
	var rec Record
	err := t.retry(ctx, "get", resource, func() error {
		begin := time.Now()
		r, err := t.read(ctx, resource)
		if err == nil && !r.live() {
			err = ErrNotHeld
		}
		rec = r.record(time.Since(begin))
		return err
	})
	if err != nil {
		return Record{}, err
	}
	return rec, nil
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
	renewed := make([]Record, 0, len(recs))
	if t.renewBatch == nil {
		for _, r := range recs {
			r, err := t.Renew(ctx, r, ttl)
			switch {
			case err == nil:
				renewed = append(renewed, r)
			case !isVerdict(err):
				return renewed, err
			}
		}
		return renewed, nil
	}
	// Sorted, so that two batches lock in the same order; each key once, because a row can be updated only once in a statement.
	sorted := slices.SortedFunc(slices.Values(recs), func(a, b Record) int {
		return cmp.Or(strings.Compare(a.Resource, b.Resource), cmp.Compare(b.Token, a.Token))
	})
	sorted = slices.CompactFunc(sorted, func(a, b Record) bool { return a.Resource == b.Resource })
	for chunk := range slices.Chunk(sorted, maxBatch) {
		p := params{ttl: ttl.Microseconds(), list: grantList(chunk)}
		err := t.retry(ctx, "renew", fmt.Sprintf("%s and %d more", chunk[0].Resource, len(chunk)-1), func() error {
			begin := time.Now()
			rows, err := t.renewRows(ctx, p, chunk)
			if err != nil {
				return err
			}
			took := time.Since(begin)
			for _, r := range rows {
				if r.live() {
					renewed = append(renewed, r.record(took))
				}
			}
			return nil
		})
		if err != nil {
			return renewed, err
		}
	}
	return renewed, nil
}

// maxBatch is how many rows one statement renews or deletes.
const maxBatch = 1000

// renewRows sends one RenewBatch and returns the rows it renewed.
func (t *Table) renewRows(ctx context.Context, p params, chunk []Record) ([]row, error) {
	if !t.st.Exec {
		return t.query(ctx, t.renewBatch, p)
	}
	res, err := t.exec(ctx, t.renewBatch, p)
	if err != nil {
		return nil, err
	}
	expires, err := res.LastInsertId()
	if err != nil || expires <= ExecRefused {
		return nil, err
	}
	n, err := res.RowsAffected()
	if err != nil {
		return nil, err
	}
	if int(n) == len(chunk) {
		rows := make([]row, len(chunk))
		for i, r := range chunk {
			rows[i] = row{Resource: r.Resource, Owner: r.Owner, Acquired: r.Token, Expires: expires, Now: expires - p.ttl}
		}
		return rows, nil
	}
	// Some were skipped or lost, or did not count because their expiry did not change. All that were renewed have this very expiry.
	all, err := t.query(ctx, t.getBatch, p)
	if err != nil {
		return nil, err
	}
	wanted := make(map[string]Record, len(chunk))
	for _, r := range chunk {
		wanted[r.Resource] = r
	}
	return slices.DeleteFunc(all, func(r row) bool {
		w := wanted[r.Resource]
		return r.Expires != expires || !r.isGrant(w.Owner, w.Token)
	}), nil
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

// errAgain says that an attempt decided nothing because another session came between.
var errAgain = errors.New("another session came between")

// grant runs an attempt until it decides, and returns the record of the row it won. A statement may read its clock before it waits for
// the row (MySQL and SQLite do; PostgreSQL when it inserts behind an uncommitted DELETE). So an attempt that waited until too little
// of the ttl was left is made again: the lease that is returned is a full one.
func (t *Table) grant(ctx context.Context, verb, resource string, ttl time.Duration, attempt func() (row, error)) (Record, error) {
	const (
		most = 3                     // on a link so slow that every attempt takes that long, the last one has to do
		wait = 25 * time.Millisecond // less is the way to the database, not a wait in it
	)
	var rec Record
	tries := 0
	err := t.retry(ctx, verb, resource, func() error {
		begin := time.Now()
		r, err := attempt()
		if err != nil {
			return err
		}
		took := time.Since(begin)
		tries++
		if left := min(micros(r.Expires-r.Now), ttl-took); tries < most && took > wait && left < ttl-ttl/4 {
			return errAgain
		}
		rec = r.record(took)
		return nil
	})
	if err != nil {
		return Record{}, err
	}
	return rec, nil
}

// change sends a statement that changes the very grant which p names, and returns the row as it is then, owner being its owner.
func (t *Table) change(ctx context.Context, s *statement, p params, owner string) (row, error) {
	r, err := t.send(ctx, s, p, owner)
	if err == nil && r.Refused {
		err = verdict(r, p)
	}
	return r, err
}

// judge says why a statement did not change the grant that p names.
func (t *Table) judge(ctx context.Context, p params) error {
	r, err := t.read(ctx, p.resource)
	if err != nil {
		return err
	}
	return verdict(r, p)
}

func verdict(r row, p params) error {
	switch {
	case !r.live():
		return ErrNotHeld
	case !r.isGrant(p.owner, p.token):
		return ErrNotOwner
	}
	return errAgain
}

// send sends Acquire, Renew, Release or Handover once and returns the row that it made owner's, or, Refused, the row in the way
// (the zero row if there is none).
func (t *Table) send(ctx context.Context, s *statement, p params, owner string) (row, error) {
	if !t.st.Exec {
		rows, err := t.query(ctx, s, p)
		if err != nil {
			return row{}, err
		}
		if len(rows) > 0 {
			return rows[0], nil
		}
		return t.refused(ctx, p)
	}
	res, err := t.exec(ctx, s, p)
	if err != nil {
		return row{}, err
	}
	id, err := res.LastInsertId()
	switch {
	case err != nil:
		return row{}, err
	case id == ExecRefused || id == 0 && s != t.acquire:
		return t.refused(ctx, p)
	case id == 0: // an engine that does not say
		r, err := t.read(ctx, p.resource)
		r.Refused = !r.live() || r.Owner != owner
		return r, err
	case id&ExecMoved != 0:
		r, err := t.read(ctx, p.resource)
		r.Refused = !r.isGrant(owner, id&^ExecMoved)
		return r, err
	case s == t.renew && p.token != 0:
		return row{Resource: p.resource, Owner: owner, Acquired: p.token, Expires: id, Now: id - p.ttl}, nil
	case s == t.renew: // token 0: only the row knows which grant it was
		r, err := t.read(ctx, p.resource)
		r.Refused = r.Owner != owner
		return r, err
	default:
		return row{Resource: p.resource, Owner: owner, Acquired: id, Expires: id + p.ttl, Now: id}, nil
	}
}

func (t *Table) refused(ctx context.Context, p params) (row, error) {
	r, err := t.read(ctx, p.resource)
	r.Refused = true
	return r, err
}

// read returns the row of resource, live or not; the zero row, which is not live, if there is none.
func (t *Table) read(ctx context.Context, resource string) (row, error) {
	rows, err := t.query(ctx, t.get, params{resource: resource})
	if err != nil || len(rows) == 0 {
		return row{}, err
	}
	return rows[0], nil
}

// retry makes attempts until one decides or ctx ends, and wraps the error. It is the one place that does.
func (t *Table) retry(ctx context.Context, verb, what string, attempt func() error) error {
	var last error
	for n := 0; ; n++ {
		if ctx.Err() != nil {
			return t.failed(ctx, verb, what, last)
		}
		err := attempt()
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errAgain) || t.dialect.Retryable(err):
			last = err
			pause(ctx, n)
		default:
			return t.failed(ctx, verb, what, err)
		}
	}
}

// failed wraps err, and with it ctx's error if that has ended: drivers report it in ways of their own.
func (t *Table) failed(ctx context.Context, verb, what string, err error) error {
	var held *HeldError
	switch ended := ctx.Err(); {
	case errors.As(err, &held):
		return held
	case isVerdict(err):
		return fmt.Errorf("locker: %s %q: %w", verb, what, err)
	case ended != nil && err == nil:
		return fmt.Errorf("locker: %s %q: %w", verb, what, ended)
	case ended != nil && !errors.Is(err, ended):
		return fmt.Errorf("locker: %s %q: %w: %w", verb, what, ended, err)
	case permanent(err):
		return permanentError{fmt.Errorf("locker: %s %q: %w%s", verb, what, err, hint(err, t.name))}
	}
	return fmt.Errorf("locker: %s %q: %w", verb, what, err)
}

// pause waits before attempt n+1: up to 1 ms at first, up to 50 ms later, so that those who collided do not collide again.
func pause(ctx context.Context, n int) {
	most := min(time.Millisecond<<min(n, 10), 50*time.Millisecond)
	select {
	case <-time.After(rand.N(most)):
	case <-ctx.Done():
	}
}

// params are the values of a statement's parameters.
type params struct {
	resource, owner, next, after, list string
	token, ttl, idle, limit            int64
}

func (p *params) value(name string, now int64) any {
	switch name {
	case "resource":
		return p.resource
	case "owner":
		return p.owner
	case "next":
		return p.next
	case "after":
		return p.after
	case "list":
		return p.list
	case "token":
		return p.token
	case "ttl":
		return p.ttl
	case "idle":
		return p.idle
	case "limit":
		return p.limit
	}
	return now // compile has refused all others
}

var paramNames = []string{"resource", "owner", "next", "after", "list", "token", "ttl", "idle", "limit", "now"}

// statement is SQL with the driver's placeholders and the names of the parameters in their order.
type statement struct {
	text     string
	names    []string
	prepare  bool
	prepared atomic.Pointer[sqlx.Stmt]
}

func compile(text string, bind int, prepare bool) (*statement, error) {
	if text == "" {
		return nil, errors.New("is empty")
	}
	named := make(map[string]any, len(paramNames))
	for _, n := range paramNames {
		named[n] = n
	}
	text, args, err := sqlx.BindNamed(bind, text, named)
	if err != nil {
		return nil, err
	}
	s := &statement{text: strings.TrimSpace(text), prepare: prepare}
	for _, a := range args {
		s.names = append(s.names, a.(string))
	}
	return s, nil
}

func (s *statement) args(p *params) []any {
	now := time.Now().UnixMicro() // once: the times of one statement are told by one clock
	args := make([]any, len(s.names))
	for i, n := range s.names {
		args[i] = p.value(n, now)
	}
	return args
}

// stmt returns the prepared statement, or nil for a driver that caches by itself. It lives as long as the pool.
func (t *Table) stmt(ctx context.Context, s *statement) (*sqlx.Stmt, error) {
	if !s.prepare {
		return nil, nil
	}
	if p := s.prepared.Load(); p != nil {
		return p, nil
	}
	p, err := t.db.PreparexContext(ctx, s.text)
	if err != nil {
		return nil, err
	}
	if !s.prepared.CompareAndSwap(nil, p) {
		p.Close() // another goroutine was first
		p = s.prepared.Load()
	}
	return p, nil
}

func (t *Table) exec(ctx context.Context, s *statement, p params) (sql.Result, error) {
	prepared, err := t.stmt(ctx, s)
	switch {
	case err != nil:
		return nil, err
	case prepared != nil:
		return prepared.ExecContext(ctx, s.args(&p)...)
	}
	return t.db.ExecContext(ctx, s.text, s.args(&p)...)
}

// query reads to the end, because that is where a failed commit shows (40001 in PostgreSQL, SQLITE_BUSY in SQLite).
func (t *Table) query(ctx context.Context, s *statement, p params) ([]row, error) {
	prepared, err := t.stmt(ctx, s)
	if err != nil {
		return nil, err
	}
	var rows *sqlx.Rows
	if prepared != nil {
		rows, err = prepared.QueryxContext(ctx, s.args(&p)...)
	} else {
		rows, err = t.db.QueryxContext(ctx, s.text, s.args(&p)...)
	}
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var all []row
	for rows.Next() {
		var r row
		if err := rows.StructScan(&r); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return all, rows.Close()
}

func grantList(recs []Record) string {
	type grant struct {
		Resource string `json:"resource"`
		Owner    string `json:"owner"`
		Token    int64  `json:"token"`
	}
	list := make([]grant, len(recs))
	for i, r := range recs {
		list[i] = grant{r.Resource, r.Owner, r.Token}
	}
	return toJSON(list)
}

func toJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and integers
	}
	return string(b)
}
