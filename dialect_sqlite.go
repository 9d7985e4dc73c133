package locker

import (
	"context"
	"database/sql"
	"errors"
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
	if db.Stats().MaxOpenConnections == 1 {
		return nil
	}
	var file string
	if err := db.QueryRowContext(ctx, `SELECT coalesce(file, '') FROM pragma_database_list WHERE name = 'main'`).Scan(&file); err != nil {
		return err
	}
	if file == "" {
		return errors.New("this database is in memory, where every connection of the pool may have one of its own; call db.SetMaxOpenConns(1), and leave its ConnMaxLifetime and ConnMaxIdleTime at 0")
	}
	return nil
}
