package locker

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"

	"github.com/jmoiron/sqlx"
)

// Postgres is the dialect for PostgreSQL 12 and later, with any driver whose errors have an SQLState method (pgx, lib/pq).
func Postgres() Dialect { return postgres{} }

type postgres struct{}

func (postgres) Name() string { return "postgres" }

func (postgres) Quote(ident string) string { return `"` + strings.ReplaceAll(ident, `"`, `""`) + `"` }

// Retryable: the statement was rolled back (https://www.postgresql.org/docs/current/errcodes-appendix.html).
func (postgres) Retryable(err error) bool {
	switch sqlState(err) {
	case "40001", // serialization_failure: the default isolation level is above READ COMMITTED
		"40P01", // deadlock_detected
		"55P03": // lock_not_available: lock_timeout is set
		return true
	}
	return false
}

// Fragments. clock_timestamp() is read when it is evaluated; now() would be the start of the transaction.
const (
	pgTTL  = `CAST(:ttl AS bigint) * interval '1 microsecond'`
	pgIdle = `expires_at <= clock_timestamp() AND acquired_at < clock_timestamp() - CAST(:idle AS bigint) * interval '1 microsecond'`
)

// pgMicros bounds the time first: -infinity marks a released row, and neither infinity fits an integer.
func pgMicros(column string) string {
	return `CAST(extract(epoch FROM least(greatest(` + column + `, 'epoch'), '9999-12-31')) * 1000000 AS bigint)`
}

func pgRow(now string) string {
	return `resource, owner, ` + pgMicros("acquired_at") + ` AS acquired, ` + pgMicros("expires_at") + ` AS expires, CAST(extract(epoch FROM ` + now + `) * 1000000 AS bigint) AS now`
}

// pgGrant changes the very grant that is named. The row is locked first and judged after that: an UPDATE alone judges its WHERE
// before it waits for the row, and does not judge again when the other session changed nothing (a renewal of a 1 s lease that
// waited behind a share lock came back with -1.5 s left). Refused, the row in the way is the answer.
func pgGrant(table, set string) string {
	return `
WITH l AS MATERIALIZED (
	SELECT resource, owner, acquired_at, expires_at FROM ` + table + ` WHERE resource = :resource FOR NO KEY UPDATE
), done AS (
	UPDATE ` + table + ` AS t SET ` + set + `
	FROM l
	WHERE t.resource = l.resource AND l.owner = :owner AND l.expires_at > clock_timestamp()
		AND (CAST(:token AS bigint) = 0 OR ` + pgMicros("l.acquired_at") + ` = :token)
	RETURNING t.resource, t.owner, t.acquired_at, t.expires_at
)
SELECT ` + pgRow("clock_timestamp()") + `, false AS refused FROM done
UNION ALL
SELECT ` + pgRow("clock_timestamp()") + `, true AS refused FROM l WHERE NOT EXISTS (SELECT FROM done)`
}

func (postgres) Statements(table string) Statements {
	return Statements{
		Bind: sqlx.DOLLAR, // no Prepare: pgx caches statements itself, and plain calls keep PgBouncer possible

		Create: []string{`CREATE TABLE IF NOT EXISTS ` + table + ` (
	resource    text COLLATE "C" PRIMARY KEY,
	owner       text COLLATE "C" NOT NULL,
	acquired_at timestamptz NOT NULL,
	expires_at  timestamptz NOT NULL
)`},

		// Losers must not write: a refused ON CONFLICT DO UPDATE locks the row, which is 96 bytes of WAL and a flush. So a live lock of
		// another, seen without a lock, stops the INSERT. What decides is still the WHERE at the end: it is evaluated on the newest
		// version of the row, locked, with clocks read after the wait. If the holder came between, neither part has a row: ask again.
		Acquire: `
WITH seen AS MATERIALIZED (
	SELECT resource, owner, acquired_at, expires_at, clock_timestamp() AS now FROM ` + table + ` WHERE resource = :resource
), won AS (
	INSERT INTO ` + table + ` AS l (resource, owner, acquired_at, expires_at)
	SELECT CAST(:resource AS text), CAST(:owner AS text), c.now, c.now + ` + pgTTL + `
	FROM (SELECT clock_timestamp() AS now) AS c
	WHERE NOT EXISTS (SELECT FROM seen WHERE seen.owner <> :owner AND seen.expires_at > seen.now)
	ON CONFLICT (resource) DO UPDATE SET
		owner = excluded.owner,
		acquired_at = greatest(l.acquired_at + interval '1 microsecond', clock_timestamp()),
		expires_at = clock_timestamp() + ` + pgTTL + `
	WHERE l.owner = excluded.owner OR l.expires_at <= clock_timestamp()
	RETURNING resource, owner, acquired_at, expires_at, clock_timestamp() AS now
)
SELECT ` + pgRow("now") + `, false AS refused FROM won
UNION ALL
SELECT ` + pgRow("now") + `, true AS refused FROM seen WHERE NOT EXISTS (SELECT FROM won)`,

		Renew:   pgGrant(table, `expires_at = clock_timestamp() + `+pgTTL),
		Release: pgGrant(table, `owner = '', expires_at = '-infinity'`),
		Handover: pgGrant(table, `owner = :next, expires_at = clock_timestamp() + `+pgTTL+`,
		acquired_at = greatest(t.acquired_at + interval '1 microsecond', clock_timestamp())`),

		// A share lock keeps out claims and renewals, not other guards. Locked first and judged after that, as in pgGrant.
		Guard: `
WITH l AS MATERIALIZED (
	SELECT resource, owner, acquired_at, expires_at FROM ` + table + ` WHERE resource = :resource FOR SHARE
)
SELECT ` + pgRow("clock_timestamp()") + `,
	NOT (owner = :owner AND ` + pgMicros("acquired_at") + ` = :token AND expires_at > clock_timestamp()) AS refused
FROM l`,

		Get: `SELECT ` + pgRow("clock_timestamp()") + ` FROM ` + table + ` WHERE resource = :resource`,
		List: `SELECT ` + pgRow("clock_timestamp()") + ` FROM ` + table + `
WHERE resource > :after AND expires_at > clock_timestamp() ORDER BY resource LIMIT CAST(:limit AS bigint)`,

		Idle: `SELECT resource FROM ` + table + ` WHERE resource > :after AND ` + pgIdle + ` ORDER BY resource LIMIT CAST(:limit AS bigint)`,
		Purge: `DELETE FROM ` + table + ` WHERE resource IN (SELECT json_array_elements_text(CAST(:list AS json)))
AND ` + pgIdle,

		// SKIP LOCKED: one row that a transaction holds must not stop the renewals of the other 999.
		RenewBatch: `
WITH want AS (
	SELECT resource, owner, token FROM json_to_recordset(CAST(:list AS json)) AS j (resource text, owner text, token bigint)
), l AS MATERIALIZED (
	SELECT t.resource, t.expires_at FROM want JOIN ` + table + ` AS t ON t.resource = want.resource
	WHERE t.owner = want.owner AND ` + pgMicros("t.acquired_at") + ` = want.token
	ORDER BY t.resource FOR NO KEY UPDATE OF t SKIP LOCKED
), done AS (
	UPDATE ` + table + ` AS t SET expires_at = clock_timestamp() + ` + pgTTL + `
	FROM l WHERE t.resource = l.resource AND l.expires_at > clock_timestamp()
	RETURNING t.resource, t.owner, t.acquired_at, t.expires_at
)
SELECT ` + pgRow("clock_timestamp()") + ` FROM done`,
	}
}

// Check refuses columns whose types would fold names (citext, a nondeterministic collation) or times.
func (postgres) Check(ctx context.Context, db *sql.DB, table string) error {
	rows, err := db.QueryContext(ctx, `
SELECT a.attname, format_type(a.atttypid, NULL), coalesce(c.collisdeterministic, true)
FROM pg_attribute AS a LEFT JOIN pg_collation AS c ON c.oid = a.attcollation
WHERE a.attrelid = to_regclass($1) AND a.attname IN ('resource', 'owner', 'acquired_at', 'expires_at')`, table)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var column, is string
		var exact bool
		if err := rows.Scan(&column, &is, &exact); err != nil {
			return err
		}
		want := map[bool]string{true: "timestamp with time zone", false: "text"}[strings.HasSuffix(column, "_at")]
		if is != want || !exact {
			return fmt.Errorf("column %s is %s, not %s with a deterministic collation; drop the table and let CreateTable make it", column, is, want)
		}
	}
	return rows.Err()
}

// Rows: the shape of the statements is that of Statements.
func (postgres) Rows(spec RowSpec, key, lockedAt *sql.ColumnType) (Statements, error) {
	keyType, spelling := "", ""
	switch key.DatabaseTypeName() {
	case "INT2", "INT4", "INT8":
		keyType, spelling = "bigint", KeyInteger
	case "UUID":
		keyType, spelling = "uuid", KeyUUID
	case "TEXT", "VARCHAR":
		keyType, spelling = "text", KeyText
	default:
		return Statements{}, &InvalidError{"RowSpec.Key", fmt.Sprintf("%s is %s; a key is an integer, uuid, text or varchar",
			spec.Key, strings.ToLower(key.DatabaseTypeName()))}
	}
	now := `clock_timestamp()`
	switch lockedAt.DatabaseTypeName() {
	case "TIMESTAMPTZ":
	case "TIMESTAMP":
		now = `(clock_timestamp() AT TIME ZONE 'UTC')`
	default:
		return Statements{}, &InvalidError{"RowSpec.LockedAt", fmt.Sprintf("%s is %s; ALTER TABLE %s ALTER COLUMN %s TYPE timestamptz",
			spec.LockedAt, strings.ToLower(lockedAt.DatabaseTypeName()), spec.Table, spec.LockedAt)}
	}
	owner, newOwner, setOwner, next, noOwner := `CAST('' AS text)`, `CAST('' AS text)`, ``, ``, ``
	if spec.Owner != "" {
		owner, newOwner, setOwner, next, noOwner = spec.Owner, `u.`+spec.Owner, spec.Owner+` = :owner, `, spec.Owner+` = :next, `, `, `+spec.Owner+` = NULL`
	}
	thisKey := spec.Key + ` = CAST(:resource AS ` + keyType + `)`
	// In the CTEs the columns have names of their own, because a table may have columns of any name.
	columns := spec.Key + ` AS k, ` + owner + ` AS o, ` + spec.LockedAt + ` AS at`
	returning := `RETURNING u.` + spec.Key + ` AS k, ` + newOwner + ` AS o, u.` + spec.LockedAt + ` AS at`
	rowOf := `CAST(k AS text) AS resource, coalesce(o, '') AS owner, ` + pgMicros("at") + ` AS acquired, ` + pgMicros("at") + ` + ` +
		`CAST(:ttl AS bigint) AS expires, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint) AS now`
	claimable := func(at, o string) string {
		if spec.Owner != "" {
			return `(` + at + ` IS NULL OR ` + at + ` <= ` + now + ` - ` + pgTTL + ` OR ` + o + ` = :owner)`
		}
		return `(` + at + ` IS NULL OR ` + at + ` <= ` + now + ` - ` + pgTTL + `)`
	}
	thisGrant := func(at, o, owner, token string) string {
		if spec.Owner != "" {
			return o + ` = ` + owner + ` AND ` + pgMicros(at) + ` >= ` + token
		}
		return pgMicros(at) + ` = ` + token
	}
	live := `l.at > ` + now + ` - ` + pgTTL
	moved := spec.LockedAt + ` = greatest(l.at + interval '1 microsecond', ` + now + `)`

	grant := func(set string) string { // see pgGrant
		return `
WITH l AS MATERIALIZED (
	SELECT ` + columns + ` FROM ` + spec.Table + ` WHERE ` + thisKey + ` FOR NO KEY UPDATE
), done AS (
	UPDATE ` + spec.Table + ` AS u SET ` + set + `
	FROM l WHERE u.` + spec.Key + ` = l.k AND ` + thisGrant("l.at", "l.o", ":owner", "CAST(:token AS bigint)") + ` AND ` + live + `
	` + returning + `
)
SELECT ` + rowOf + `, false AS refused FROM done
UNION ALL
SELECT ` + rowOf + `, true AS refused FROM l WHERE NOT EXISTS (SELECT FROM done)`
	}
	return Statements{
		Bind: sqlx.DOLLAR,
		Key:  spelling,

		// Losers must not write: the condition stands where the row is locked, so that a row that does not meet it is not locked.
		Acquire: `
WITH l AS MATERIALIZED (
	SELECT ` + columns + ` FROM ` + spec.Table + ` WHERE ` + thisKey + ` AND ` + claimable(spec.LockedAt, spec.Owner) + ` FOR NO KEY UPDATE
), won AS (
	UPDATE ` + spec.Table + ` AS u SET ` + setOwner + moved + `
	FROM l WHERE u.` + spec.Key + ` = l.k
	` + returning + `
), seen AS (
	SELECT ` + columns + ` FROM ` + spec.Table + ` WHERE ` + thisKey + `
)
SELECT ` + rowOf + `, false AS refused FROM won
UNION ALL
SELECT ` + rowOf + `, true AS refused FROM seen WHERE NOT EXISTS (SELECT FROM won)`,

		Renew:    grant(moved),
		Release:  grant(spec.LockedAt + ` = NULL` + noOwner),
		Handover: grant(next + moved),
		Finish: `
UPDATE ` + spec.Table + ` SET :set, ` + spec.LockedAt + ` = NULL` + noOwner + `
WHERE ` + thisKey + ` AND ` + thisGrant(spec.LockedAt, spec.Owner, ":owner", "CAST(:token AS bigint)"),

		Guard: `
WITH l AS MATERIALIZED (
	SELECT ` + columns + ` FROM ` + spec.Table + ` WHERE ` + thisKey + ` FOR NO KEY UPDATE
)
SELECT ` + rowOf + `,
	NOT coalesce(` + thisGrant("l.at", "l.o", ":owner", "CAST(:token AS bigint)") + ` AND ` + live + `, false) AS refused
FROM l`,

		Get: `WITH l AS (SELECT ` + columns + ` FROM ` + spec.Table + ` WHERE ` + thisKey + `) SELECT ` + rowOf + ` FROM l`,

		RenewBatch: `
WITH locker_want AS (
	SELECT resource, owner, token FROM json_to_recordset(CAST(:list AS json)) AS j (resource ` + keyType + `, owner text, token bigint)
), l AS MATERIALIZED (
	SELECT t.` + spec.Key + ` AS k, t.` + spec.LockedAt + ` AS at FROM locker_want AS want JOIN ` + spec.Table + ` AS t ON t.` + spec.Key + ` = want.resource
	WHERE ` + thisGrant("t."+spec.LockedAt, "t."+spec.Owner, "want.owner", "want.token") + `
	ORDER BY k FOR NO KEY UPDATE OF t SKIP LOCKED
), done AS (
	UPDATE ` + spec.Table + ` AS u SET ` + moved + `
	FROM l WHERE u.` + spec.Key + ` = l.k AND ` + live + `
	` + returning + `
)
SELECT ` + rowOf + ` FROM done`,
	}, nil
}

// CheckRows refuses what could not hold a lock, see checkRows.
func (d postgres) CheckRows(ctx context.Context, db *sql.DB, spec RowSpec) (RowDialect, error) {
	return d, d.checkRows(ctx, db, spec)
}

func (postgres) checkRows(ctx context.Context, db *sql.DB, spec RowSpec) error {
	table, err := quoteTable(postgres{}, spec.Table)
	if err != nil {
		return err
	}
	rows, err := db.QueryContext(ctx, `
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attgenerated <> '', coalesce(l.collisdeterministic, true),
	c.relkind = 'p' OR c.relkind = 'r' AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid),
	EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
		AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum)
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
	LEFT JOIN pg_collation AS l ON l.oid = a.attcollation
WHERE c.oid = to_regclass($1)`, table)
	if err != nil {
		return err
	}
	defer rows.Close()
	alter := func(field, column, is, format string, args ...any) error {
		return &InvalidError{"RowSpec." + field, fmt.Sprintf("%s is %s; ALTER TABLE %s ", column, is, spec.Table) + fmt.Sprintf(format, args...)}
	}
	found := 0
	for rows.Next() {
		var column, is string
		var notNull, generated, exact, isTable, unique bool
		if err := rows.Scan(&column, &is, &notNull, &generated, &exact, &isTable, &unique); err != nil {
			return err
		}
		if column == spec.Key || column == spec.LockedAt || column == spec.Owner {
			found++
		}
		switch {
		case !isTable:
			return &InvalidError{"RowSpec.Table", spec.Table + " is not a table, or others INHERIT from it, in which a key may stand again"}
		case column == spec.Key && !unique:
			return alter("Key", column, "not unique, so one lock would be of many rows", "ADD UNIQUE (%s)", column)
		case column == spec.Key && !exact:
			return alter("Key", column, "of a collation that takes different keys for the same", `ALTER COLUMN %s TYPE text COLLATE "C"`, column)
		case column == spec.LockedAt && !slices.Contains([]string{"timestamp with time zone", "timestamp without time zone",
			"timestamp(6) with time zone", "timestamp(6) without time zone"}, is):
			return alter("LockedAt", column, is+", which does not hold microseconds", "ALTER COLUMN %s TYPE timestamptz", column)
		case column == spec.Owner && (is != "text" && is != "character varying" && is != "character varying(255)" || !exact):
			return alter("Owner", column, is+", which does not hold 255 bytes as they are", `ALTER COLUMN %s TYPE text COLLATE "C"`, column)
		case (column == spec.LockedAt || column == spec.Owner) && generated:
			return alter("LockedAt", column, "generated", "ALTER COLUMN %s DROP EXPRESSION", column)
		case (column == spec.LockedAt || column == spec.Owner) && notNull:
			return alter("LockedAt", column, "NOT NULL, and NULL is what a free row has", "ALTER COLUMN %s DROP NOT NULL", column)
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if want := 2 + min(len(spec.Owner), 1); found != want {
		return &InvalidError{"RowSpec", fmt.Sprintf("%s has %d of the %d columns by these very names", spec.Table, found, want)}
	}
	return nil
}
