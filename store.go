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
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jmoiron/sqlx"
)

// store is the machinery of Table and RowTable: it compiles a dialect's statements, sends them, makes attempts again, and turns rows
// into records and verdicts.
type store struct {
	db      *sqlx.DB
	dialect Dialect
	name    string // as it was given, for messages
	quoted  string
	skew    time.Duration
	st      Statements

	acquire, renew, release, handover, get, list, idle, purge, guard, renewBatch, getBatch, lock *statement

	// Of a RowTable.
	moving    bool   // a renewal moves the token, and a resource without a row is ErrNoRow
	anonymous bool   // there is no owner column
	ttl       int64  // of all leases, in microseconds
	probe     string // names the columns and reads nothing
}

// open takes what New and NewRowTable are given.
func (t *store) open(db *sql.DB, d Dialect, opts []Option) error {
	if db == nil {
		return &InvalidError{"db", "is nil"}
	}
	if d == nil {
		return &InvalidError{"dialect", "is nil; use Postgres, MySQL or SQLite"}
	}
	t.db, t.dialect = sqlx.NewDb(db, d.Name()), d
	for _, o := range opts {
		if o == nil {
			return &InvalidError{"option", "is nil"}
		}
		if err := o.applyStore(t); err != nil {
			return err
		}
	}
	return nil
}

// compile compiles the statements of t.st. Those that are not required may be empty.
func (t *store) compile(required ...string) error {
	if t.st.Exec && t.st.RenewBatch != "" {
		required = append(required, "GetBatch")
	}
	for _, s := range []struct {
		to   **statement
		name string
		text string
	}{
		{&t.acquire, "Acquire", t.st.Acquire},
		{&t.renew, "Renew", t.st.Renew},
		{&t.release, "Release", t.st.Release},
		{&t.handover, "Handover", t.st.Handover},
		{&t.get, "Get", t.st.Get},
		{&t.list, "List", t.st.List},
		{&t.idle, "Idle", t.st.Idle},
		{&t.purge, "Purge", t.st.Purge},
		{&t.guard, "Guard", t.st.Guard},
		{&t.renewBatch, "RenewBatch", t.st.RenewBatch},
		{&t.getBatch, "GetBatch", t.st.GetBatch},
		{&t.lock, "Lock", t.st.Lock},
	} {
		if s.text == "" && !slices.Contains(required, s.name) {
			continue
		}
		c, err := compile(s.text, t.st.Bind, t.st.Prepare)
		if err != nil {
			return fmt.Errorf("locker: statement %s of dialect %s: %w", s.name, t.dialect.Name(), err)
		}
		*s.to = c
	}
	return nil
}

// sqlx takes ":" for the start of a parameter, and "::" for a colon.
func escapeColons(s string) string   { return strings.ReplaceAll(s, ":", "::") }
func unescapeColons(s string) string { return strings.ReplaceAll(s, "::", ":") }

// ClockSkew is what WithClockSkew set, or 0 for the default. A Session takes its margin from it.
func (t *store) ClockSkew() time.Duration { return t.skew }

// errAgain says that an attempt decided nothing because another session came between.
var errAgain = errors.New("another session came between")

// grant runs an attempt until it decides, and returns the record of the row it won. A statement may read its clock before it waits for
// the row (MySQL and SQLite do; PostgreSQL when it inserts behind an uncommitted DELETE). So an attempt that waited until too little
// of the ttl was left is followed by another, which is given what it won: the lease that is returned is a full one.
func (t *store) grant(ctx context.Context, verb, resource string, ttl time.Duration, attempt func(won *row) (row, error)) (Record, error) {
	const (
		most = 3                     // on a link so slow that every attempt takes that long, the last one has to do
		wait = 25 * time.Millisecond // less is the way to the database, not a wait in it
	)
	var rec Record
	var won *row
	tries := 0
	err := t.retry(ctx, verb, resource, func() error {
		begin := time.Now()
		r, err := attempt(won)
		if err != nil {
			return err
		}
		took := time.Since(begin)
		tries++
		won = &r
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

// claim sends Acquire once.
func (t *store) claim(ctx context.Context, p params) (row, error) {
	begin := time.Now()
	held := func(r row) bool { return r.live() && (t.anonymous || r.Owner != p.owner) }
	missing := func(r row) bool { return t.moving && r.Resource == "" }
	if t.st.ReadFirst {
		switch seen, err := t.read(ctx, p.resource); {
		case err != nil:
			return row{}, err
		case missing(seen):
			return row{}, ErrNoRow
		case held(seen):
			return row{}, &HeldError{seen.record(time.Since(begin))}
		}
	}
	r, err := t.send(ctx, t.acquire, p, p.owner)
	switch {
	case err != nil || !r.Refused:
		return r, err
	case missing(r):
		return row{}, ErrNoRow
	case held(r):
		return row{}, &HeldError{r.record(time.Since(begin))}
	}
	return row{}, errAgain // the holder came and went in the meantime
}

// prolong renews a grant that was just won, and came too late to be a full lease.
func (t *store) prolong(ctx context.Context, won *row, p params) (row, error) {
	p.owner, p.token = won.Owner, won.Acquired
	return t.change(ctx, t.renew, p, won.Owner)
}

// prolongGiven is prolong after a hand-over: if the new lease is over already, that is no verdict on the record that was given away.
func (t *store) prolongGiven(ctx context.Context, won *row, p params) (row, error) {
	r, err := t.prolong(ctx, won, p)
	if isVerdict(err) {
		err = fmt.Errorf("given to %q, whose lease is over already: %v", won.Owner, err)
	}
	return r, err
}

func (t *store) free(ctx context.Context, rec Record) error {
	p := t.params(rec)
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

// look is Get.
func (t *store) look(ctx context.Context, resource string) (Record, error) {
	var rec Record
	err := t.retry(ctx, "get", resource, func() error {
		begin := time.Now()
		r, err := t.read(ctx, resource)
		switch {
		case err != nil:
			return err
		case t.moving && r.Resource == "":
			return ErrNoRow
		case !r.live():
			return ErrNotHeld
		}
		rec = r.record(time.Since(begin))
		return nil
	})
	if err != nil {
		return Record{}, err
	}
	return rec, nil
}

// change sends a statement that changes the very grant which p names, and returns the row as it is then, owner being its owner.
func (t *store) change(ctx context.Context, s *statement, p params, owner string) (row, error) {
	r, err := t.send(ctx, s, p, owner)
	if err == nil && r.Refused {
		err = t.verdict(r, p)
	}
	return r, err
}

// judge says why a statement did not change the grant that p names.
func (t *store) judge(ctx context.Context, p params) error {
	r, err := t.read(ctx, p.resource)
	if err != nil {
		return err
	}
	return t.verdict(r, p)
}

func (t *store) verdict(r row, p params) error {
	switch {
	case t.moving && r.Resource == "":
		return ErrNoRow
	case !r.live():
		return ErrNotHeld
	case !t.isGrant(r, p.owner, p.token):
		return ErrNotOwner
	}
	return errAgain
}

// isGrant reports whether r is the grant that owner and token name.
func (t *store) isGrant(r row, owner string, token int64) bool {
	switch {
	case t.anonymous:
		return r.Acquired == token
	case token == 0: // any grant of owner
		return r.Owner == owner
	case t.moving: // its owner is its own, and so is a renewal whose answer was lost
		return r.Owner == owner && r.Acquired >= token
	}
	return r.Owner == owner && r.Acquired == token
}

// send sends Acquire, Renew, Release or Handover once and returns the row that it made owner's, or, Refused, the row in the way
// (the zero row if there is none).
func (t *store) send(ctx context.Context, s *statement, p params, owner string) (row, error) {
	if !t.st.Exec {
		query := t.query
		if s == t.acquire && t.lock != nil {
			query = t.queryAlone
		}
		rows, err := query(ctx, s, p)
		switch {
		case err != nil:
			return row{}, err
		case len(rows) == 0:
			return t.refused(ctx, p)
		case t.anonymous && !rows[0].Refused:
			rows[0].Owner = owner
		}
		return rows[0], nil
	}
	res, err := t.exec(ctx, s, p)
	if err != nil {
		return row{}, err
	}
	id, err := res.LastInsertId()
	switch {
	case err != nil:
		return row{}, err
	case id == 0 && t.moving:
		return t.unnamed(ctx, res, p, owner)
	case id == ExecRefused || id == 0 && s != t.acquire:
		return t.refused(ctx, p)
	case id == 0: // an engine that does not say
		r, err := t.read(ctx, p.resource)
		r.Refused = !r.live() || r.Owner != owner
		return r, err
	case id&ExecMoved != 0:
		r, err := t.read(ctx, p.resource)
		r.Refused = !t.isGrant(r, owner, id&^ExecMoved)
		return r, err
	case s == t.renew && !t.moving && p.token != 0:
		return row{Resource: p.resource, Owner: owner, Acquired: p.token, Expires: id, Now: id - p.ttl}, nil
	case s == t.renew && !t.moving: // token 0: only the row knows which grant it was
		r, err := t.read(ctx, p.resource)
		r.Refused = r.Owner != owner
		return r, err
	default:
		return row{Resource: p.resource, Owner: owner, Acquired: id, Expires: id + p.ttl, Now: id}, nil
	}
}

// unnamed is what became of a row when the answer has no token: nothing matched, or a trigger of the table has taken the LastInsertId
// from it. With an owner of its own the row says whose it is.
func (t *store) unnamed(ctx context.Context, res sql.Result, p params, owner string) (row, error) {
	n, err := res.RowsAffected()
	switch {
	case err != nil:
		return row{}, err
	case n == 0:
		return t.refused(ctx, p)
	case t.anonymous:
		return row{}, permanentError{errors.New("a trigger on this table hides the token; add an owner column to the rows")}
	}
	r, err := t.read(ctx, p.resource)
	r.Refused = !r.live() || r.Owner != owner
	return r, err
}

func (t *store) refused(ctx context.Context, p params) (row, error) {
	r, err := t.read(ctx, p.resource)
	r.Refused = true
	return r, err
}

// read returns the row of resource, live or not; the zero row, which is not live, if there is none.
func (t *store) read(ctx context.Context, resource string) (row, error) {
	rows, err := t.query(ctx, t.get, params{resource: resource, ttl: t.ttl})
	if err != nil || len(rows) == 0 {
		return row{}, err
	}
	return rows[0], nil
}

// renewAll is RenewBatch: renewOne is for a dialect that has no statement for it.
func (t *store) renewAll(ctx context.Context, recs []Record, ttl time.Duration, renewOne func(context.Context, Record) (Record, error)) ([]Record, error) {
	renewed := make([]Record, 0, len(recs))
	if t.renewBatch == nil {
		for _, r := range recs {
			r, err := renewOne(ctx, r)
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
			wanted := byResource(chunk)
			for _, r := range rows {
				if t.anonymous {
					r.Owner = wanted[r.Resource].Owner
				}
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
func (t *store) renewRows(ctx context.Context, p params, chunk []Record) ([]row, error) {
	switch {
	case !t.st.Exec:
		return t.query(ctx, t.renewBatch, p)
	case t.moving:
		return t.moveRows(ctx, p)
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
	wanted := byResource(chunk)
	return slices.DeleteFunc(all, func(r row) bool {
		w := wanted[r.Resource]
		return r.Expires != expires || !t.isGrant(r, w.Owner, w.Token)
	}), nil
}

// moveRows renews rows whose token moves and cannot be returned by an UPDATE: it locks those of the list that are live, gives them
// new tokens, and returns them.
func (t *store) moveRows(ctx context.Context, p params) ([]row, error) {
	// READ COMMITTED keeps no lock on rows that the list does not name.
	tx, err := t.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	rows, err := scan(tx.QueryContext(ctx, t.getBatch.text, t.getBatch.args(&p)...))
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	recs := make([]Record, len(rows))
	for i, r := range rows {
		recs[i] = r.record(0)
		recs[i].Token = min(max(r.Now, r.Acquired+1), lastMicro) // its own: a row may have been locked into the future by hand
	}
	p.list = grantList(recs)
	if _, err := tx.ExecContext(ctx, t.renewBatch.text, t.renewBatch.args(&p)...); err != nil {
		return nil, err
	}
	for i := range rows {
		token := recs[i].Token
		rows[i].Acquired, rows[i].Now, rows[i].Expires = token, token, token+p.ttl
	}
	return rows, tx.Commit()
}

// lastMicro is the last microsecond of the year 9999, the last that every engine can write.
const lastMicro = 253402300799999999

func byResource(recs []Record) map[string]Record {
	m := make(map[string]Record, len(recs))
	for _, r := range recs {
		m[r.Resource] = r
	}
	return m
}

// retry makes attempts until one decides or ctx ends, and wraps the error. It is the one place that does.
func (t *store) retry(ctx context.Context, verb, what string, attempt func() error) error {
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
func (t *store) failed(ctx context.Context, verb, what string, err error) error {
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
		todo := ""
		if !t.moving { // the table is ours
			todo = hint(err, t.name)
		}
		return permanentError{fmt.Errorf("locker: %s %q: %w%s", verb, what, err, todo)}
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
	args                               []any // of Finish: arg0, arg1, …
}

// params names the grant of rec.
func (t *store) params(rec Record) params {
	return params{resource: rec.Resource, owner: rec.Owner, token: rec.Token, ttl: t.ttl}
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
	if n, ok := strings.CutPrefix(name, "arg"); ok {
		i, _ := strconv.Atoi(n)
		return p.args[i]
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

func compile(text string, bind int, prepare bool, more ...string) (*statement, error) {
	if text == "" {
		return nil, errors.New("is empty")
	}
	named := make(map[string]any, len(paramNames))
	for _, n := range append(more, paramNames...) {
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
func (t *store) stmt(ctx context.Context, s *statement) (*sqlx.Stmt, error) {
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

func (t *store) exec(ctx context.Context, s *statement, p params) (sql.Result, error) {
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
func (t *store) query(ctx context.Context, s *statement, p params) ([]row, error) {
	prepared, err := t.stmt(ctx, s)
	switch {
	case err != nil:
		return nil, err
	case prepared != nil:
		return scan(prepared.QueryContext(ctx, s.args(&p)...))
	}
	return scan(t.db.QueryContext(ctx, s.text, s.args(&p)...))
}

// queryAlone is query in a transaction of its own that has waited for all other writers before s reads :now.
func (t *store) queryAlone(ctx context.Context, s *statement, p params) ([]row, error) {
	if _, err := t.stmt(ctx, s); err != nil { // now: the pool may have one connection
		return nil, err
	}
	tx, err := t.db.BeginTxx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, t.lock.text); err != nil {
		return nil, err
	}
	query := func() (*sql.Rows, error) { return tx.QueryContext(ctx, s.text, s.args(&p)...) }
	if prepared, _ := t.stmt(ctx, s); prepared != nil {
		query = func() (*sql.Rows, error) { return tx.StmtxContext(ctx, prepared).QueryContext(ctx, s.args(&p)...) }
	}
	all, err := scan(query())
	if err != nil {
		return nil, err
	}
	return all, tx.Commit()
}

func scan(rows *sql.Rows, err error) ([]row, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var all []row
	if err := sqlx.StructScan(rows, &all); err != nil {
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

// quoteTable quotes each part of name.
func quoteTable(d Dialect, name string) (string, error) {
	parts, err := splitTable(name)
	for i := range parts {
		parts[i] = d.Quote(parts[i])
	}
	return strings.Join(parts, "."), err
}

// splitTable splits name at its dots, those in double quotes apart.
func splitTable(name string) ([]string, error) {
	invalid := func(reason string) ([]string, error) {
		return nil, &InvalidError{"table", fmt.Sprintf("%q %s", name, reason)}
	}
	if err := checkText("table", name); err != nil {
		return nil, err
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
		parts = append(parts, part)
	}
	if len(parts) > 2 {
		return invalid("has more than two parts; write schema.table")
	}
	return parts, nil
}
