package locker

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/jmoiron/sqlx"
)

// SQLite is the dialect for SQLite 3.38 and later, with any driver whose errors have a Code (modernc.org/sqlite, mattn/go-sqlite3).
// The clock is the host's: all users of the file are on one machine.
//
// It works with any pragmas, best with journal_mode(WAL) and busy_timeout(100). Without WAL readers can starve the writer: beside eight
// tight loops of refused acquires three renewals came through in 5 s (with WAL the slowest of them took 110 ms). A long busy_timeout is
// no help: a Table waits for a busy file by itself, bounded by ctx, while inside busy_timeout a statement does not hear its ctx before
// SQLite 3.54 (modernc.org/sqlite 1.59 and 1.62, 3 s of busy_timeout under a ctx of 100 ms: 3 s and 0.1 s).
func SQLite() Dialect { return sqlite{} }

type sqlite struct{}

func (sqlite) Name() string { return "sqlite" }

func (sqlite) Quote(ident string) string { return `"` + strings.ReplaceAll(ident, `"`, `""`) + `"` }

// Retryable: SQLITE_BUSY and SQLITE_LOCKED with all their extended codes (https://sqlite.org/rescode.html). A lock library does not
// answer "database is locked".
func (sqlite) Retryable(err error) bool {
	code := sqliteCode(err) & 0xff
	return code == 5 || code == 6
}

// SQLite's own clock has milliseconds; :now is this process's, in microseconds.
const (
	liteRow   = `resource, owner, acquired_at AS acquired, expires_at AS expires, CAST(:now AS INTEGER) AS now`
	liteGrant = `resource = :resource AND owner = :owner AND (:token = 0 OR acquired_at = :token) AND expires_at > :now`
	liteIdle  = `expires_at <= :now AND acquired_at < :now - :idle`
)

func (sqlite) Statements(table string) Statements {
	return Statements{
		Bind:      sqlx.QUESTION,
		Prepare:   true, // compiling costs as much as running
		ReadFirst: true, // a refused upsert would take the file's one write lock all the same

		Create: []string{`CREATE TABLE IF NOT EXISTS ` + table + ` (
	resource    TEXT NOT NULL PRIMARY KEY,
	owner       TEXT NOT NULL,
	acquired_at INTEGER NOT NULL, -- microseconds since 1970, UTC
	expires_at  INTEGER NOT NULL  -- microseconds since 1970, UTC
) WITHOUT ROWID`},

		Acquire: `
INSERT INTO ` + table + ` AS l (resource, owner, acquired_at, expires_at)
VALUES (:resource, :owner, :now, :now + :ttl)
ON CONFLICT (resource) DO UPDATE SET
	owner = excluded.owner,
	acquired_at = max(l.acquired_at + 1, excluded.acquired_at),
	expires_at = excluded.expires_at
WHERE l.owner = excluded.owner OR l.expires_at <= excluded.acquired_at
RETURNING ` + liteRow,

		Renew: `
UPDATE ` + table + ` SET expires_at = :now + :ttl
WHERE ` + liteGrant + ` RETURNING ` + liteRow,
		Release: `
UPDATE ` + table + ` SET owner = '', expires_at = 0
WHERE ` + liteGrant + ` RETURNING ` + liteRow,
		Handover: `
UPDATE ` + table + ` SET owner = :next, expires_at = :now + :ttl, acquired_at = max(acquired_at + 1, :now)
WHERE ` + liteGrant + ` RETURNING ` + liteRow,

		// There are no row locks: a write takes the file's one write lock.
		Guard: `
UPDATE ` + table + ` SET expires_at = expires_at + 1
WHERE ` + liteGrant + ` RETURNING ` + liteRow,

		Get:  `SELECT ` + liteRow + ` FROM ` + table + ` WHERE resource = :resource`,
		List: `SELECT ` + liteRow + ` FROM ` + table + ` WHERE resource > :after AND expires_at > :now ORDER BY resource LIMIT :limit`,

		Idle:  `SELECT resource FROM ` + table + ` WHERE resource > :after AND ` + liteIdle + ` ORDER BY resource LIMIT :limit`,
		Purge: `DELETE FROM ` + table + ` WHERE resource IN (SELECT value FROM json_each(:list)) AND ` + liteIdle,

		RenewBatch: `
UPDATE ` + table + ` AS t SET expires_at = :now + :ttl
FROM json_each(:list) AS j
WHERE t.resource = j.value ->> 'resource' AND t.owner = j.value ->> 'owner' AND t.acquired_at = j.value ->> 'token' AND t.expires_at > :now
RETURNING ` + liteRow,
	}
}

// Check refuses a database in memory behind a pool of several connections, where each connection may have a database of its own
// and two owners both win.
func (sqlite) Check(ctx context.Context, db *sql.DB, table string) error {
	return checkMemory(ctx, db, sql.NullString{})
}

func checkMemory(ctx context.Context, db *sql.DB, schema sql.NullString) error {
	if db.Stats().MaxOpenConnections == 1 {
		return nil
	}
	var file string
	if err := db.QueryRowContext(ctx, `SELECT coalesce(file, '') FROM pragma_database_list WHERE name = coalesce(?, 'main')`, schema).Scan(&file); err != nil {
		return err
	}
	if file == "" {
		return errors.New("this database is in memory, where every connection of the pool may have one of its own; call db.SetMaxOpenConns(1), and leave its ConnMaxLifetime and ConnMaxIdleTime at 0")
	}
	return nil
}

// liteFar is the year 9999: what is no time at all keeps a row locked.
const liteFar = `253402300799999999`

// Rows: the shape of the statements is that of Statements. Times are integers (microseconds since 1970) or text in UTC, as in
// 2006-01-02 15:04:05.999999.
func (sqlite) Rows(spec RowSpec, key, lockedAt *sql.ColumnType) (Statements, error) {
	affinity := func(c *sql.ColumnType) string { // https://sqlite.org/datatype3.html, 3.1
		is := strings.ToUpper(c.DatabaseTypeName())
		for _, a := range []struct{ word, affinity string }{{"INT", "INTEGER"}, {"CHAR", "TEXT"}, {"CLOB", "TEXT"}, {"TEXT", "TEXT"}} {
			if strings.Contains(is, a.word) {
				return a.affinity
			}
		}
		return is
	}
	var spelling, param, listKey string
	switch affinity(key) {
	case "INTEGER":
		spelling, param, listKey = KeyInteger, `CAST(:resource AS INTEGER)`, `CAST(j.locker_resource AS INTEGER)`
	case "TEXT":
		// Explicitly, because the column may be declared with another collation than its index.
		spelling, param, listKey = KeyText, `:resource COLLATE BINARY`, `j.locker_resource COLLATE BINARY`
	default:
		return Statements{}, &InvalidError{"RowSpec.Key", fmt.Sprintf("%s is %q; a key is an INTEGER or TEXT", spec.Key, key.DatabaseTypeName())}
	}
	var micros, at func(string) string
	switch affinity(lockedAt) {
	case "INTEGER":
		micros = func(c string) string {
			return `CASE typeof(` + c + `) WHEN 'integer' THEN min(` + c + `, ` + liteFar + `) WHEN 'null' THEN 0 ELSE ` + liteFar + ` END`
		}
		at = func(n string) string { return n }
	case "TEXT", "DATETIME", "TIMESTAMP":
		micros = func(c string) string {
			return `CASE WHEN ` + c + ` IS NULL OR ` + c + ` LIKE '0000-%' THEN 0 WHEN typeof(` + c + `) = 'text' AND ` + c + ` LIKE '____-__-__%' THEN
	coalesce(strftime('%s', substr(` + c + `, 1, 19)) * 1000000 + substr(substr(` + c + `, 21) || '000000', 1, 6), ` + liteFar + `) ELSE ` + liteFar + ` END`
		}
		at = func(n string) string {
			n = `min(` + n + `, ` + liteFar + `)`
			return `strftime('%Y-%m-%d %H::%M::%S', ` + n + ` / 1000000, 'unixepoch') || printf('.%06d', ` + n + ` % 1000000)`
		}
	default:
		return Statements{}, &InvalidError{"RowSpec.LockedAt", fmt.Sprintf("%s is %q; declare it INTEGER (microseconds since 1970) or TEXT",
			spec.LockedAt, lockedAt.DatabaseTypeName())}
	}
	thisKey := spec.Key + ` = ` + param
	acquired := micros(spec.LockedAt)
	owner, setOwner, next, noOwner := `''`, ``, ``, ``
	claimable := acquired + ` <= :now - :ttl`
	thisGrant := acquired + ` = :token`
	listGrant := micros(`u.`+spec.LockedAt) + ` = j.locker_token`
	if spec.Owner != "" {
		owner, setOwner, next, noOwner = `coalesce(`+spec.Owner+`, '')`, spec.Owner+` = :owner, `, spec.Owner+` = :next, `, `, `+spec.Owner+` = NULL`
		claimable = `(` + claimable + ` OR ` + spec.Owner + ` = :owner COLLATE BINARY)`
		thisGrant = spec.Owner + ` = :owner COLLATE BINARY AND ` + acquired + ` >= :token`
		listGrant = `u.` + spec.Owner + ` = j.locker_owner COLLATE BINARY AND ` + micros(`u.`+spec.LockedAt) + ` >= j.locker_token`
	}
	live := acquired + ` > :now - :ttl`
	moved := spec.LockedAt + ` = ` + at(`max(`+acquired+` + 1, :now)`)
	row := `CAST(` + spec.Key + ` AS TEXT) AS resource, ` + owner + ` AS owner, ` + acquired + ` AS acquired, ` + acquired + ` + :ttl AS expires,
	CAST(:now AS INTEGER) AS now`

	return Statements{
		Bind:      sqlx.QUESTION,
		Prepare:   true,
		ReadFirst: true,
		Key:       spelling,

		// A claim that waited while another came and went would else have the lower token, since a free row forgets. A write of nothing
		// takes the file's one write lock, also in a deferred transaction.
		Lock: `UPDATE ` + spec.Table + ` SET ` + spec.LockedAt + ` = NULL WHERE 1 = 0`,
		Acquire: `
UPDATE ` + spec.Table + ` SET ` + setOwner + moved + `
WHERE ` + thisKey + ` AND ` + claimable + ` RETURNING ` + row,

		Renew: `
UPDATE ` + spec.Table + ` SET ` + moved + `
WHERE ` + thisKey + ` AND ` + thisGrant + ` AND ` + live + ` RETURNING ` + row,
		Release: `
UPDATE ` + spec.Table + ` SET ` + spec.LockedAt + ` = NULL` + noOwner + `
WHERE ` + thisKey + ` AND ` + thisGrant + ` AND ` + live + ` RETURNING ` + row,
		Handover: `
UPDATE ` + spec.Table + ` SET ` + next + moved + `
WHERE ` + thisKey + ` AND ` + thisGrant + ` AND ` + live + ` RETURNING ` + row,
		Finish: `
UPDATE ` + spec.Table + ` SET :set, ` + spec.LockedAt + ` = NULL` + noOwner + `
WHERE ` + thisKey + ` AND ` + thisGrant,

		// There are no row locks: a write, of what is there already, takes the file's one write lock.
		Guard: `
UPDATE ` + spec.Table + ` SET ` + spec.LockedAt + ` = ` + spec.LockedAt + `
WHERE ` + thisKey + ` AND ` + thisGrant + ` AND ` + live + ` RETURNING ` + row,

		Get: `SELECT ` + row + ` FROM ` + spec.Table + ` WHERE ` + thisKey,

		RenewBatch: `
UPDATE ` + spec.Table + ` AS u SET ` + spec.LockedAt + ` = ` + at(`max(`+micros(`u.`+spec.LockedAt)+` + 1, :now)`) + `
FROM (SELECT value ->> 'resource' AS locker_resource, value ->> 'owner' AS locker_owner, value ->> 'token' AS locker_token FROM json_each(:list)) AS j
WHERE u.` + spec.Key + ` = ` + listKey + ` AND ` + listGrant + ` AND ` + micros(`u.`+spec.LockedAt) + ` > :now - :ttl
RETURNING ` + row,
	}, nil
}

// CheckRows refuses what could not hold a lock, see checkRows.
func (d sqlite) CheckRows(ctx context.Context, db *sql.DB, spec RowSpec) (RowDialect, error) {
	return d, d.checkRows(ctx, db, spec)
}

func (sqlite) checkRows(ctx context.Context, db *sql.DB, spec RowSpec) error {
	parts, err := splitTable(spec.Table)
	if err != nil {
		return err
	}
	table, schema := parts[len(parts)-1], sql.NullString{String: parts[0], Valid: len(parts) == 2}

	// A name that is no column would be taken for text, and any other type takes the owners 1e3 and 1000 for one.
	var columns, texts int
	err = db.QueryRowContext(ctx, `
SELECT count(*), coalesce(sum(lower(name) = lower(?) AND (type IN ('', 'BLOB', 'ANY')
	OR NOT instr(upper(type), 'INT') AND (instr(upper(type), 'CHAR') OR instr(upper(type), 'TEXT') OR instr(upper(type), 'CLOB')))), 0)
FROM pragma_table_xinfo(?, ?) WHERE lower(name) IN (lower(?), lower(?), lower(?))`,
		spec.Owner, table, schema, spec.Key, spec.LockedAt, spec.Owner).Scan(&columns, &texts)
	owned := min(len(spec.Owner), 1)
	switch {
	case err != nil:
		return err
	case columns != 2+owned:
		return &InvalidError{"RowSpec", fmt.Sprintf("%s has %d of the %d columns", spec.Table, columns, 2+owned)}
	case texts != owned:
		return &InvalidError{"RowSpec.Owner", fmt.Sprintf("%s of %s is not text; declare it TEXT", spec.Owner, spec.Table)}
	}
	var fixed string
	err = db.QueryRowContext(ctx, `
SELECT name FROM pragma_table_xinfo(?, ?) WHERE lower(name) IN (lower(?), lower(?)) AND ("notnull" OR hidden)`,
		table, schema, spec.LockedAt, spec.Owner).Scan(&fixed)
	switch {
	case err == nil:
		return &InvalidError{"RowSpec.LockedAt", fmt.Sprintf("%s is NOT NULL or generated, and NULL is what a free row has; make %s anew without",
			fixed, spec.Table)}
	case !errors.Is(err, sql.ErrNoRows):
		return err
	}

	// The key has an index of its own, or is the rowid, which needs none.
	var collation string
	err = db.QueryRowContext(ctx, `
SELECT coll FROM (
SELECT c.coll AS coll FROM pragma_index_list(?, ?) AS i, pragma_index_xinfo(i.name, ?) AS c
WHERE i."unique" AND NOT i.partial AND c.key AND lower(c.name) = lower(?) AND (SELECT sum(key) FROM pragma_index_xinfo(i.name, ?)) = 1
UNION ALL
SELECT 'BINARY' FROM pragma_table_xinfo(?, ?) WHERE pk AND lower(name) = lower(?) AND upper(type) = 'INTEGER'
	AND (SELECT max(pk) FROM pragma_table_xinfo(?, ?)) = 1
) ORDER BY coll <> 'BINARY'`,
		table, schema, schema, spec.Key, schema, table, schema, spec.Key, table, schema).Scan(&collation)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return &InvalidError{"RowSpec.Key", fmt.Sprintf("%s is not unique, so one lock would be of many rows; CREATE UNIQUE INDEX … ON %s (%s)",
			spec.Key, spec.Table, spec.Key)}
	case err != nil:
		return err
	case collation != "BINARY":
		return &InvalidError{"RowSpec.Key", fmt.Sprintf("%s is COLLATE %s, which takes different keys for the same; make %s anew without it",
			spec.Key, collation, spec.Table)}
	}
	return checkMemory(ctx, db, schema)
}
