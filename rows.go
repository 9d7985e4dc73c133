package locker

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// RowSpec says which rows of which table are locks, and for how long.
type RowSpec struct {
	Table    string        // "users" or "app.users", as WithTable takes it
	Key      string        // the column that a resource names: its primary key, or another unique one; an integer, a uuid or text
	LockedAt string        // the nullable timestamp column that is the lock: when it was taken, which is also its token
	Owner    string        // a nullable text column for the owner, or "": nobody needs to know
	TTL      time.Duration // how long a lock lasts; everybody who locks these rows must use the same
}

// RowDialect is an optional interface of a Dialect: row leases.
type RowDialect interface {
	// Rows returns the SQL for the rows of spec, whose names are quoted already (all of Table), or says which column's type will not do
	// and what to alter. What of Statements serves here, and what is different, stands there.
	Rows(spec RowSpec, key, lockedAt *sql.ColumnType) (Statements, error)
}

// RowChecker is an optional interface of a RowDialect. NewRowTable calls it before Rows, with the names as the caller gave them.
type RowChecker interface {
	// CheckRows looks at the table and the pool. It returns the dialect to use, which may know more of the table than the one that was
	// asked; or an error that says what would break a promise and what to alter.
	CheckRows(ctx context.Context, db *sql.DB, spec RowSpec) (RowDialect, error)
}

// RowTable is a Locker on rows of a table of the application's own: the lock is a nullable timestamp column of the row that it
// protects, and a resource is the row's key. There is no other table, no row is ever inserted or deleted, and no other column is
// touched.
//
// What is different from a Table:
//
//   - All leases have the TTL of RowSpec, which is not in the row, so everybody must use the same. Acquire and Renew with another are
//     ErrInvalid, and so is WithMinHold. A Session takes its default TTL from here.
//   - A resource without a row is ErrNoRow.
//   - The resource is the key in its canonical text ("7", not "07"; a uuid in lower case), else ErrInvalid.
//   - A renewal moves the token, which is when the lock was last taken or renewed, and AcquiredAt with it.
//   - A release forgets: tokens rise only as the database's clock does.
//   - NULL in the column is free, and so is what is a TTL ago or longer; a time in the future is held until a TTL after that. What is no
//     time at all, which only SQLite lets in, is held.
//
// With an Owner column each grant needs an owner that is used for no other, as those of a Session are: then all records of that owner
// name its grant, also one from before a renewal whose answer was lost. Without one the exact token is all that tells a grant:
// acquiring again is ErrHeld for its own holder too, token 0 is ErrInvalid, the Owner in what Get and *HeldError say is empty,
// and a lost answer costs the lease (a Session has ErrNotOwner at the next renewal; a lost acquire blocks the row for a TTL). In MySQL a
// table with an UPDATE trigger needs the column.
//
// The application must leave the two columns alone, and above all not write them back as a part of the row: an ORM that saves all
// fields of a row it read earlier brings back a lock that was released, or clears one that is held. Do not map them, or map them
// read-only. By hand, UPDATE … SET locked_at = NULL forces a lock open, and a time in the future keeps a row locked until then and a TTL longer.
//
// Columns without a time zone hold UTC. A RowTable is safe for concurrent use. What Table says of pools and of statements that are
// sent again holds here as well.
type RowTable struct {
	store
	spec RowSpec
}

var (
	_ Locker       = (*RowTable)(nil)
	_ BatchRenewer = (*RowTable)(nil)
	_ Handoverer   = (*RowTable)(nil)
	_ Pinger       = (*RowTable)(nil)
)

// NewRowTable returns a RowTable for the rows that spec names, after it has looked at the table: a column whose type cannot hold a lock
// to the microsecond, a key that is not unique, a pool that never commits and the like are errors (*InvalidError) that say what to
// alter. Of the options of New it takes WithClockSkew.
func NewRowTable(ctx context.Context, db *sql.DB, d Dialect, spec RowSpec, opts ...Option) (*RowTable, error) {
	r := &RowTable{spec: spec, store: store{name: spec.Table, moving: true, anonymous: spec.Owner == ""}}
	if err := r.open(db, d, opts); err != nil {
		return nil, err
	}
	rows, ok := d.(RowDialect)
	if !ok {
		return nil, &InvalidError{"dialect", fmt.Sprintf("%s has no row leases (RowDialect)", d.Name())}
	}
	quoted, err := spec.quote(d)
	if err != nil {
		return nil, err
	}
	if spec.TTL, err = CheckTTL(spec.TTL); err != nil {
		return nil, err
	}
	r.spec, r.quoted, r.ttl = spec, quoted.Table, spec.TTL.Microseconds()
	r.probe = "SELECT " + quoted.Key + ", " + quoted.LockedAt
	if spec.Owner != "" {
		r.probe += ", " + quoted.Owner
	}
	r.probe += " FROM " + quoted.Table + " WHERE 1 = 0"

	var types []*sql.ColumnType
	err = r.retry(ctx, "look at", spec.Table, func() (err error) {
		types, err = r.columns(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	if c, ok := d.(RowChecker); ok {
		rows, err = c.CheckRows(ctx, db, spec)
		switch {
		case errors.Is(err, ErrInvalid):
			return nil, err
		case err != nil:
			return nil, r.failed(ctx, "look at", spec.Table, err)
		}
	}
	quoted.Table, quoted.Key = escapeColons(quoted.Table), escapeColons(quoted.Key)
	quoted.LockedAt, quoted.Owner = escapeColons(quoted.LockedAt), escapeColons(quoted.Owner)
	if r.st, err = rows.Rows(quoted, types[0], types[1]); err != nil {
		return nil, err
	}
	if err := r.compile("Acquire", "Renew", "Release", "Handover", "Get"); err != nil {
		return nil, err
	}
	return r, nil
}

// quote returns spec with quoted names.
func (spec RowSpec) quote(d Dialect) (RowSpec, error) {
	var err error
	if spec.Table, err = quoteTable(d, spec.Table); err != nil {
		return spec, err
	}
	seen := make(map[string]string)
	for _, c := range []struct {
		field string
		name  *string
	}{{"Key", &spec.Key}, {"LockedAt", &spec.LockedAt}, {"Owner", &spec.Owner}} {
		name := *c.name
		switch {
		case name == "" && c.field == "Owner":
			continue
		case name == "":
			return spec, &InvalidError{"RowSpec." + c.field, "is empty"}
		case len(name) > 64:
			return spec, &InvalidError{"RowSpec." + c.field, fmt.Sprintf("has %d bytes; no column name is that long", len(name))}
		case seen[name] != "":
			return spec, &InvalidError{"RowSpec." + c.field, fmt.Sprintf("is %q, and so is %s", name, seen[name])}
		}
		if err := checkText("RowSpec."+c.field, name); err != nil {
			return spec, err
		}
		seen[name] = c.field
		*c.name = d.Quote(name)
	}
	return spec, nil
}

// columns returns the types of the columns of the probe.
func (r *RowTable) columns(ctx context.Context) ([]*sql.ColumnType, error) {
	rows, err := r.db.QueryContext(ctx, r.probe)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	types, err := rows.ColumnTypes()
	if err != nil {
		return nil, err
	}
	for rows.Next() {
	}
	return types, rows.Err()
}

// What Statements.Key may be.
const (
	KeyInteger  = "integer"  // a 64-bit integer
	KeyUnsigned = "unsigned" // a 64-bit integer without a sign
	KeyUUID     = "uuid"
	KeyText     = "text"
)

var canonicalUUID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// checkResource returns nil if resource is the canonical text of a key, so that one row has one name.
func (r *RowTable) checkResource(resource string) error {
	if err := CheckName("resource", resource); err != nil {
		return err
	}
	canonical := true
	switch r.st.Key {
	case KeyInteger:
		n, err := strconv.ParseInt(resource, 10, 64)
		canonical = err == nil && strconv.FormatInt(n, 10) == resource
	case KeyUnsigned:
		n, err := strconv.ParseUint(resource, 10, 64)
		canonical = err == nil && strconv.FormatUint(n, 10) == resource
	case KeyUUID:
		canonical = canonicalUUID.MatchString(resource)
	}
	if !canonical {
		return &InvalidError{"resource", fmt.Sprintf("is %q, which is no key of %s in its one spelling (%s)", resource, r.name,
			map[string]string{KeyInteger: "7, not 07", KeyUnsigned: "7, not 07", KeyUUID: "lower case, with hyphens"}[r.st.Key])}
	}
	return nil
}

func (r *RowTable) checkTTL(ttl time.Duration) error {
	ttl, err := CheckTTL(ttl)
	if err == nil && ttl != r.spec.TTL {
		err = &InvalidError{"ttl", fmt.Sprintf("is %v; all leases on the rows of %s have %v", ttl, r.name, r.spec.TTL)}
	}
	return err
}

func (r *RowTable) checkGrant(rec Record) error {
	if r.anonymous {
		if rec.Token == 0 {
			return &InvalidError{"token", fmt.Sprintf("is 0 for %q; without an owner column only the token tells whose grant it is", rec.Resource)}
		}
		if rec.Owner == "" { // as Get says
			rec.Owner = "-"
		}
	}
	if err := CheckGrant(rec); err != nil {
		return err
	}
	return r.checkResource(rec.Resource)
}

// TTL returns the TTL of all leases.
func (r *RowTable) TTL() time.Duration { return r.spec.TTL }

// Acquire claims the row for owner, see Locker and RowTable. ttl must be TTL().
func (r *RowTable) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (Record, error) {
	if err := r.checkResource(resource); err != nil {
		return Record{}, err
	}
	if err := CheckName("owner", owner); err != nil {
		return Record{}, err
	}
	if err := r.checkTTL(ttl); err != nil {
		return Record{}, err
	}
	p := params{resource: resource, owner: owner, ttl: r.ttl}
	return r.grant(ctx, "acquire", resource, r.spec.TTL, func(won *row) (row, error) {
		if won != nil { // its own grant would be refused
			if again, err := r.prolong(ctx, won, p); !isVerdict(err) {
				return again, err
			} // over already
		}
		return r.claim(ctx, p)
	})
}

// Renew prolongs the grant that rec names and returns the record to use from now on, with a new token; see Locker and RowTable. ttl
// must be TTL().
func (r *RowTable) Renew(ctx context.Context, rec Record, ttl time.Duration) (Record, error) {
	if err := r.checkGrant(rec); err != nil {
		return Record{}, err
	}
	if err := r.checkTTL(ttl); err != nil {
		return Record{}, err
	}
	return r.renewOne(ctx, rec)
}

func (r *RowTable) renewOne(ctx context.Context, rec Record) (Record, error) {
	p := r.params(rec)
	return r.grant(ctx, "renew", rec.Resource, r.spec.TTL, func(won *row) (row, error) {
		if won != nil {
			p.token = won.Acquired
		}
		return r.change(ctx, r.renew, p, rec.Owner)
	})
}

// Handover gives the grant that rec names to owner, see Handoverer. ttl must be TTL().
func (r *RowTable) Handover(ctx context.Context, rec Record, owner string, ttl time.Duration) (Record, error) {
	if err := r.checkGrant(rec); err != nil {
		return Record{}, err
	}
	if err := CheckName("owner", owner); err != nil {
		return Record{}, err
	}
	if err := r.checkTTL(ttl); err != nil {
		return Record{}, err
	}
	p := r.params(rec)
	p.next = owner
	return r.grant(ctx, "hand over", rec.Resource, r.spec.TTL, func(won *row) (row, error) {
		if won != nil {
			return r.prolongGiven(ctx, won, p)
		}
		return r.change(ctx, r.handover, p, owner)
	})
}

// Release sets the lock to NULL if it is still that of the grant that rec names, see Locker.
func (r *RowTable) Release(ctx context.Context, rec Record) error {
	if err := r.checkGrant(rec); err != nil {
		return err
	}
	return r.free(ctx, rec)
}

// Get reads a live lock, see Locker. Do not decide on it that a lock is free: acquire it.
func (r *RowTable) Get(ctx context.Context, resource string) (Record, error) {
	if err := r.checkResource(resource); err != nil {
		return Record{}, err
	}
	return r.look(ctx, resource)
}

// RenewBatch renews many grants, a thousand in a request, see BatchRenewer. Every record must have its token; ttl must be TTL().
func (r *RowTable) RenewBatch(ctx context.Context, recs []Record, ttl time.Duration) ([]Record, error) {
	if err := r.checkTTL(ttl); err != nil {
		return nil, err
	}
	for _, rec := range recs {
		if err := r.checkGrant(rec); err != nil {
			return nil, err
		}
	}
	return r.renewAll(ctx, recs, r.spec.TTL, r.renewOne)
}

// Ping returns nil if the columns can be read.
func (r *RowTable) Ping(ctx context.Context) error {
	return r.retry(ctx, "ping", r.name, func() error {
		_, err := r.columns(ctx)
		return err
	})
}

// Guard checks, in the caller's transaction, that rec is the live grant, and keeps claimers out until the transaction ends: all that
// Table.Guard says holds here as well. It locks the row for update and leaves the token as it is.
//
// Take the record for it from Lease.Record at the last moment: without an Owner column a renewal that comes between the two is ErrLost.
// On a Galera cluster a lock that only locks is known to one node: there it is a change of this row in the same transaction, or
// Finish, that makes a claim on another node and this transaction collide (1213).
func (r *RowTable) Guard(ctx context.Context, tx Tx, rec Record) error {
	if err := r.checkGrant(rec); err != nil {
		return err
	}
	return r.check(ctx, tx, rec)
}

// Finish completes the work and releases the lock in one statement, if the row is still locked by the grant that rec names:
//
//	UPDATE users SET <set>, locked_at = NULL WHERE id = … AND locked_at = …
//
// So a late worker can neither finish another's work nor free another's row: ErrNotOwner if there is a newer grant, ErrNotHeld if there
// is none, and nothing has changed. A lease that has run out is finished all the same as long as nobody else has come in.
//
// set is constant text of the program, never of its input: assignments to columns of the row, with a ? for each of args on every
// engine. (A question mark that is no placeholder has to be one of args; PostgreSQL may want to be told a type, CAST(? AS text).)
//
// Under a Session call it in Lease.ReleaseWith, which keeps the heartbeat out and has the right token.
func (r *RowTable) Finish(ctx context.Context, rec Record, set string, args ...any) error {
	if err := r.checkGrant(rec); err != nil {
		return err
	}
	switch n := strings.Count(set, "?"); {
	case r.st.Finish == "":
		return &InvalidError{"dialect", fmt.Sprintf("%s has no Finish statement", r.dialect.Name())}
	case rec.Token == 0:
		return &InvalidError{"token", fmt.Sprintf("is 0 for %q; only an exact grant can be finished", rec.Resource)}
	case strings.TrimSpace(set) == "":
		return &InvalidError{"set", "is empty; Release only releases"}
	case quotedMark(set):
		return &InvalidError{"set", "has a question mark in quotes; put that text into an argument"}
	case n != len(args):
		return &InvalidError{"set", fmt.Sprintf("has %d question marks for %d arguments", n, len(args))}
	}
	text := escapeColons(set)
	named := make([]string, len(args))
	for i := range args {
		named[i] = fmt.Sprintf("arg%d", i)
		text = strings.Replace(text, "?", ":"+named[i]+" ", 1) // a cast may follow, which is no part of the name
	}
	// A line of its own: a comment at the end of set must not take the rest of the statement with it.
	s, err := compile(strings.Replace(r.st.Finish, " SET :set,", " SET "+text+"\n,", 1), r.st.Bind, false, named...)
	if err != nil {
		return &InvalidError{"set", err.Error()}
	}
	p := r.params(rec)
	p.args = args
	return r.retry(ctx, "finish", rec.Resource, func() error {
		res, err := r.exec(ctx, s, p)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		if err != nil || n > 0 {
			return err
		}
		return r.judge(ctx, p)
	})
}

// quotedMark reports whether a question mark stands in quotes, where drivers differ in what they take it for.
func quotedMark(set string) bool {
	var quote rune
	for _, c := range set {
		switch {
		case quote == 0 && strings.ContainsRune("'\"`", c):
			quote = c
		case c == quote:
			quote = 0
		case c == '?' && quote != 0:
			return true
		}
	}
	return false
}
