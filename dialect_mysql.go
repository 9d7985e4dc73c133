package locker

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jmoiron/sqlx"
)

// MySQL is the dialect for MySQL 8.0 and MariaDB 10.6 and later (InnoDB) with go-sql-driver/mysql, under any mix of its options.
func MySQL() Dialect { return mysql{} }

type mysql struct {
	// Of the key of a RowTable, see CheckRows.
	index string
	uuid  bool
}

func (mysql) Name() string { return "mysql" }

// Quote uses the backtick, which ANSI_QUOTES does not change.
func (mysql) Quote(ident string) string { return "`" + strings.ReplaceAll(ident, "`", "``") + "`" }

// Retryable: the statement was rolled back (https://mariadb.com/kb/en/mariadb-error-code-reference/).
func (mysql) Retryable(err error) bool {
	switch mysqlNumber(err) {
	case 1213, // ER_LOCK_DEADLOCK; on Galera also the loser of a certification
		1205, // ER_LOCK_WAIT_TIMEOUT
		1020: // ER_CHECKREAD: the row moved on (MariaDB, innodb_snapshot_isolation)
		return true
	}
	return false
}

// Fragments. UTC_TIMESTAMP is the start of the statement, in UTC whatever time_zone says (SYSDATE would be read later, but in the
// session's zone, where an hour in autumn is told twice). UNIX_TIMESTAMP and FROM_UNIXTIME end in 2038.
const (
	myNow       = `UTC_TIMESTAMP(6)`
	myTTL       = `INTERVAL :ttl MICROSECOND`
	myClaimable = `(expires_at <= ` + myNow + ` OR owner = VALUES(owner))`
	myMoved     = `GREATEST(acquired_at + INTERVAL 1 MICROSECOND, ` + myNow + `)`
	myRow       = `resource, owner, TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', acquired_at) AS acquired,
	TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', expires_at) AS expires, TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', ` + myNow + `) AS now`
	myIdle = `expires_at <= ` + myNow + ` AND acquired_at < ` + myNow + ` - INTERVAL :idle MICROSECOND`
)

func myMicros(time string) string {
	return `TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', ` + time + `)`
}

// The answer rides in LAST_INSERT_ID(expr), which the OK packet carries: row counts cannot judge (an insert is 1, an update 2,
// nothing 0, or 1 with clientFoundRows). Its argument always reads a column, so that it is evaluated for the row and not ahead of
// it. The test is the same in every column and expires_at comes last, because MySQL assigns from left to right; with MariaDB's
// SIMULTANEOUS_ASSIGNMENT, which does not, that is the same.
var (
	myToken = `IF(acquired_at >= ` + myNow + `, ` + myMicros("acquired_at") + fmt.Sprintf(` + 1 + %d, `, int64(ExecMoved)) + myMicros(myNow) + `)`
	myGrant = `resource = :resource AND owner = :owner AND (:token = 0 OR ` + myMicros("acquired_at") + ` = :token)`
)

// myList reads :list whatever the character set of the connection is: the bytes are UTF-8.
func myList(columns string) string {
	return `JSON_TABLE(CONVERT(CAST(:list AS BINARY) USING utf8mb4), '$[*]' COLUMNS (` + columns + `)) AS j`
}

const (
	myNames  = `resource VARCHAR(255) CHARACTER SET utf8mb4 PATH '$'`
	myGrants = `resource VARCHAR(255) CHARACTER SET utf8mb4 PATH '$.resource', owner VARCHAR(255) CHARACTER SET utf8mb4 PATH '$.owner', token BIGINT PATH '$.token'`
)

func (mysql) Statements(table string) Statements {
	// The list leads and each row is found by its key. Left to itself the optimizer may scan the table, and then it locks all of it.
	byName := ` STRAIGHT_JOIN ` + table + ` AS t FORCE INDEX (PRIMARY) ON t.resource = CAST(j.resource AS BINARY)`

	return Statements{
		Bind:    sqlx.QUESTION,
		Prepare: true, // go-sql-driver prepares, executes and closes for each call with arguments
		Exec:    true, // no UPDATE … RETURNING

		// VARBINARY: the default collations fold case, accents and trailing spaces, and utf8mb4_bin still folds spaces.
		Create: []string{`CREATE TABLE IF NOT EXISTS ` + table + ` (
	resource    VARBINARY(255) NOT NULL PRIMARY KEY,
	owner       VARBINARY(255) NOT NULL,
	acquired_at DATETIME(6) NOT NULL COMMENT 'UTC',
	expires_at  DATETIME(6) NOT NULL COMMENT 'UTC'
) ENGINE = InnoDB`},

		// The plain upsert: a refused one changes nothing and writes no redo. (PostgreSQL's guard, INSERT … SELECT … WHERE NOT EXISTS,
		// made 3,337 deadlocks in 3 s here.) VALUES(), which MySQL 8.0.20 deprecates, because MariaDB has no row alias.
		// Where autocommit is off nothing would be committed and everybody granted: NULL is an error then.
		Acquire: `
INSERT INTO ` + table + ` (resource, owner, acquired_at, expires_at)
VALUES (:resource, :owner, DATE'1970-01-01' + INTERVAL LAST_INSERT_ID(` + myMicros(myNow) + `) MICROSECOND, IF(@@autocommit, ` + myNow + ` + ` + myTTL + `, NULL))
ON DUPLICATE KEY UPDATE
	acquired_at = IF(LAST_INSERT_ID(IF(` + myClaimable + `, ` + myToken + `, 1)) = 1, acquired_at, ` + myMoved + `),
	owner = IF(` + myClaimable + `, VALUES(owner), owner),
	expires_at = IF(` + myClaimable + `, VALUES(expires_at), expires_at)`,

		Renew: `
UPDATE ` + table + ` SET
	expires_at = IF(LAST_INSERT_ID(IF(expires_at > ` + myNow + `, ` + myMicros(myNow) + ` + :ttl, 1)) = 1, expires_at, ` + myNow + ` + ` + myTTL + `)
WHERE ` + myGrant,
		Release: `
UPDATE ` + table + ` SET owner = '', expires_at = DATE'1970-01-01'
WHERE ` + myGrant + ` AND expires_at > ` + myNow,
		Handover: `
UPDATE ` + table + ` SET
	acquired_at = IF(LAST_INSERT_ID(IF(expires_at > ` + myNow + `, ` + myToken + `, 1)) = 1, acquired_at, ` + myMoved + `),
	owner = IF(expires_at > ` + myNow + `, :next, owner),
	expires_at = IF(expires_at > ` + myNow + `, ` + myNow + ` + ` + myTTL + `, expires_at)
WHERE ` + myGrant,

		// A change, because on Galera a share lock is known to one node only: with it 612 of 8,749 guarded commits came after another's
		// claim, with this none of 4,297. Judged by the start of the statement; if the lease ended while it waited for the row, nobody
		// else has claimed it since, and now nobody can.
		Guard: `
UPDATE ` + table + ` SET expires_at = expires_at + INTERVAL 1 MICROSECOND
WHERE ` + myGrant + ` AND expires_at > ` + myNow,

		Get:  `SELECT ` + myRow + ` FROM ` + table + ` WHERE resource = :resource`,
		List: `SELECT ` + myRow + ` FROM ` + table + ` WHERE resource > :after AND expires_at > ` + myNow + ` ORDER BY resource LIMIT :limit`,

		Idle:  `SELECT resource FROM ` + table + ` WHERE resource > :after AND ` + myIdle + ` ORDER BY resource LIMIT :limit`,
		Purge: `DELETE t FROM ` + myList(myNames) + byName + ` WHERE ` + myIdle,

		// The derived table locks what it can get and skips the rest; its LIMIT (the list is never longer) keeps it from being merged
		// into the UPDATE, which would drop SKIP LOCKED.
		RenewBatch: `
UPDATE (
	SELECT t.resource FROM ` + myList(myGrants) + byName + `
	WHERE t.owner = CAST(j.owner AS BINARY) AND ` + myMicros("t.acquired_at") + ` = j.token AND t.expires_at > ` + myNow + `
	LIMIT ` + fmt.Sprint(maxBatch) + ` FOR UPDATE SKIP LOCKED
) AS l STRAIGHT_JOIN ` + table + ` AS t FORCE INDEX (PRIMARY) ON t.resource = l.resource
SET t.expires_at = IF(LAST_INSERT_ID(IF(t.expires_at > ` + myNow + `, ` + myMicros(myNow) + ` + :ttl, 1)) = 1, t.expires_at, ` + myNow + ` + ` + myTTL + `)`,
		GetBatch: `
SELECT t.resource, t.owner, ` + myMicros("t.acquired_at") + ` AS acquired, ` + myMicros("t.expires_at") + ` AS expires, ` + myMicros(myNow) + ` AS now
FROM ` + myList(myGrants) + byName,
	}
}

// Check refuses what the statements cannot make up for: a key that lets a name in twice, columns that fold or cut names or times, and
// a session that never commits.
func (mysql) Check(ctx context.Context, db *sql.DB, table string) error {
	rows, err := sqlx.NewDb(db, "mysql").QueryxContext(ctx, `SHOW COLUMNS FROM `+table)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		c := make(map[string]any)
		if err := rows.MapScan(c); err != nil {
			return err
		}
		column, is := fmt.Sprintf("%s", c["Field"]), strings.ToLower(fmt.Sprintf("%s, key %s", c["Type"], c["Key"]))
		want, known := map[string]string{
			"resource": "varbinary(255), key pri", "owner": "varbinary(255), key ",
			"acquired_at": "datetime(6), key ", "expires_at": "datetime(6), key ",
		}[column]
		if known && is != want {
			return fmt.Errorf("column %s is %s, not %s (a folding collation or a short column takes different names for the same, "+
				"another key lets a name in twice or keeps it out); drop the table and let CreateTable make it", column, is, want)
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return checkAutocommit(ctx, db)
}

func checkAutocommit(ctx context.Context, db *sql.DB) error {
	// By itself: beside an aggregate, MariaDB 10.11 answers 0 whatever it is.
	var autocommit bool
	if err := db.QueryRowContext(ctx, `SELECT @@autocommit`).Scan(&autocommit); err != nil {
		return err
	}
	if !autocommit {
		return errors.New("autocommit is off in this pool, so no statement would ever be committed; remove autocommit=0 from the DSN")
	}
	return nil
}

// myLate is how many microseconds ago the statement started: SYSDATE is read when it is evaluated, here after the wait for the row. Both
// are in the session's zone; where the hour changes between them, or one of them is set by hand, the difference is none.
const myLateness = `TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))`

var myLate = `(` + myMicros(myNow) + ` + IF(` + myLateness + ` BETWEEN 0 AND 1800000000, ` + myLateness + `, 0))`

// Rows: the shape of the statements is that of Statements, but what is judged stands in WHERE, because a row is never inserted. There is
// no TIMESTAMP: its hour in autumn is told twice, and it ends in 2038.
func (d mysql) Rows(spec RowSpec, key, lockedAt *sql.ColumnType) (Statements, error) {
	is := key.DatabaseTypeName()
	text := func(param string) string { return `CONVERT(CAST(` + param + ` AS BINARY) USING utf8mb4)` } // see myList
	bytes := func(column string) string { return `CAST(CONVERT(` + column + ` USING utf8mb4) AS BINARY)` }
	spelling, listType, listKey := KeyText, `VARCHAR(255) CHARACTER SET utf8mb4`, `j.locker_key`
	thisKey := spec.Key + ` = ` + text(":resource") + ` AND CAST(` + spec.Key + ` AS BINARY) = CAST(:resource AS BINARY)`
	resource := bytes(spec.Key)
	switch strings.TrimPrefix(is, "UNSIGNED ") {
	case "TINYINT", "SMALLINT", "MEDIUMINT", "INT", "BIGINT":
		spelling, listType, thisKey = KeyInteger, `BIGINT`, spec.Key+` = CAST(:resource AS SIGNED)`
		if strings.HasPrefix(is, "UNSIGNED ") {
			spelling, listType, thisKey = KeyUnsigned, `BIGINT UNSIGNED`, spec.Key+` = CAST(:resource AS UNSIGNED)`
		}
		resource = `CAST(` + spec.Key + ` AS CHAR)`
	case "VARCHAR", "CHAR":
		if d.uuid {
			spelling, thisKey, resource = KeyUUID, spec.Key+` = `+text(":resource"), `CAST(`+spec.Key+` AS CHAR)`
		}
	case "VARBINARY":
		thisKey, listKey, resource = spec.Key+` = CAST(:resource AS BINARY)`, `CAST(j.locker_key AS BINARY)`, spec.Key
	default:
		return Statements{}, &InvalidError{"RowSpec.Key", fmt.Sprintf("%s is %s; a key is an integer, CHAR, VARCHAR or VARBINARY", spec.Key, is)}
	}
	if lockedAt.DatabaseTypeName() != "DATETIME" {
		return Statements{}, &InvalidError{"RowSpec.LockedAt", fmt.Sprintf("%s is %s; ALTER TABLE %s MODIFY %s DATETIME(6) NULL",
			spec.LockedAt, lockedAt.DatabaseTypeName(), spec.Table, spec.LockedAt)}
	}
	micros := func(column string) string { return `COALESCE(` + myMicros(column) + `, 0)` } // NULL, and zero dates
	owner, setOwner, next, noOwner := `''`, ``, ``, ``
	claimable := `(` + spec.LockedAt + ` IS NULL OR ` + spec.LockedAt + ` <= ` + myNow + ` - ` + myTTL + `)`
	thisGrant := micros(spec.LockedAt) + ` = :token`
	listGrant := micros(`t.`+spec.LockedAt) + ` = j.locker_token`
	if spec.Owner != "" {
		isOwner := `CAST(` + spec.Owner + ` AS BINARY) = CAST(:owner AS BINARY)`
		owner, setOwner, next = `COALESCE(`+bytes(spec.Owner)+`, '')`, spec.Owner+` = `+text(":owner")+`, `, spec.Owner+` = `+text(":next")+`, `
		noOwner = `, ` + spec.Owner + ` = NULL`
		claimable = `(` + claimable + ` OR ` + isOwner + `)`
		thisGrant = isOwner + ` AND ` + micros(spec.LockedAt) + ` >= :token`
		listGrant = `CAST(t.` + spec.Owner + ` AS BINARY) = CAST(j.locker_owner AS BINARY) AND ` + micros(`t.`+spec.LockedAt) + ` >= j.locker_token`
	}
	live := spec.LockedAt + ` > ` + myNow + ` - ` + myTTL
	at := func(micros string) string { return `DATE'1970-01-01' + INTERVAL ` + micros + ` MICROSECOND` }
	// Read after the wait: a claim that waited while another came and went would else have the lower token, since a free row forgets.
	moved := spec.LockedAt + ` = ` + at(fmt.Sprintf(`LAST_INSERT_ID(LEAST(GREATEST(%s + 1, %s), %d))`, micros(spec.LockedAt), myLate, int64(lastMicro)))
	row := resource + ` AS resource, ` + owner + ` AS owner, ` + micros(spec.LockedAt) + ` AS acquired, ` + micros(spec.LockedAt) + ` + :ttl AS expires,
	` + myMicros(myNow) + ` AS now`
	list := myList(`locker_key ` + listType + ` PATH '$.resource', locker_owner VARCHAR(255) CHARACTER SET utf8mb4 PATH '$.owner', locker_token BIGINT PATH '$.token'`)
	byKey := ` STRAIGHT_JOIN ` + spec.Table + ` AS t FORCE INDEX (` + escapeColons(d.Quote(d.index)) + `) ON t.` + spec.Key + ` = ` + listKey

	return Statements{
		Bind:    sqlx.QUESTION,
		Prepare: true,
		Exec:    true,
		Key:     spelling,

		Acquire: `
UPDATE ` + spec.Table + ` SET ` + setOwner + moved + `
WHERE ` + thisKey + ` AND ` + claimable,

		Renew: `
UPDATE ` + spec.Table + ` SET ` + moved + `
WHERE ` + thisKey + ` AND ` + thisGrant + ` AND ` + live,
		Release: `
UPDATE ` + spec.Table + ` SET ` + spec.LockedAt + ` = NULL` + noOwner + `
WHERE ` + thisKey + ` AND ` + thisGrant + ` AND ` + live,
		Handover: `
UPDATE ` + spec.Table + ` SET ` + next + moved + `
WHERE ` + thisKey + ` AND ` + thisGrant + ` AND ` + live,
		Finish: `
UPDATE ` + spec.Table + ` SET :set, ` + spec.LockedAt + ` = NULL` + noOwner + `
WHERE ` + thisKey + ` AND ` + thisGrant,

		Guard: `SELECT ` + row + ` FROM ` + spec.Table + ` WHERE ` + thisKey + ` AND ` + thisGrant + ` AND ` + live + ` FOR UPDATE`,

		Get: `SELECT ` + row + ` FROM ` + spec.Table + ` WHERE ` + thisKey,

		GetBatch: `
SELECT ` + row + `
FROM ` + list + byKey + `
WHERE ` + listGrant + ` AND t.` + live + ` FOR UPDATE SKIP LOCKED`,
		RenewBatch: `UPDATE ` + list + byKey + ` SET t.` + spec.LockedAt + ` = ` + at(`j.locker_token`),
	}, nil
}

// CheckRows refuses what could not hold a lock, and finds the index that statements with many keys have to name.
func (d mysql) CheckRows(ctx context.Context, db *sql.DB, spec RowSpec) (RowDialect, error) {
	var err error
	if d.index, err = uniqueIndex(ctx, db, spec); err != nil {
		return nil, err
	}
	if d.uuid, err = checkColumns(ctx, db, spec); err != nil {
		return nil, err
	}
	return d, checkAutocommit(ctx, db)
}

// show returns the rows of a SHOW statement about the table as text.
func show(ctx context.Context, db *sql.DB, what string, spec RowSpec) ([]map[string]string, error) {
	table, err := quoteTable(mysql{}, spec.Table)
	if err != nil {
		return nil, err
	}
	rows, err := sqlx.NewDb(db, "mysql").QueryxContext(ctx, `SHOW `+what+` FROM `+table)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var all []map[string]string
	for rows.Next() {
		values := make(map[string]any)
		if err := rows.MapScan(values); err != nil {
			return nil, err
		}
		texts := make(map[string]string)
		for k, v := range values {
			switch v := v.(type) {
			case nil:
			case []byte:
				texts[k] = string(v)
			default:
				texts[k] = fmt.Sprint(v)
			}
		}
		all = append(all, texts)
	}
	return all, rows.Err()
}

// uniqueIndex returns the name of the index that makes the key unique.
func uniqueIndex(ctx context.Context, db *sql.DB, spec RowSpec) (string, error) {
	indexes, err := show(ctx, db, `INDEX`, spec)
	if err != nil {
		return "", err
	}
	columnsOf := make(map[string]int)
	var uniqueOn []string // indexes that the key is the first column of
	for _, i := range indexes {
		columnsOf[i["Key_name"]]++
		if i["Ignored"] == "YES" || i["Visible"] == "NO" {
			continue
		}
		if i["Non_unique"] == "0" && strings.EqualFold(i["Column_name"], spec.Key) && i["Sub_part"] == "" {
			uniqueOn = append(uniqueOn, i["Key_name"])
		}
	}
	i := slices.IndexFunc(uniqueOn, func(name string) bool { return columnsOf[name] == 1 })
	if i < 0 {
		return "", &InvalidError{"RowSpec.Key", fmt.Sprintf("%s is not unique, so one lock would be of many rows; ALTER TABLE %s ADD UNIQUE (%s)",
			spec.Key, spec.Table, spec.Key)}
	}
	return uniqueOn[i], nil
}

// checkColumns also reports whether the key is of the type UUID (MariaDB), which looks like CHAR to the driver.
func checkColumns(ctx context.Context, db *sql.DB, spec RowSpec) (uuid bool, err error) {
	parts, err := splitTable(spec.Table)
	if err != nil {
		return false, err
	}
	var isEngine string
	err = db.QueryRowContext(ctx, `
SELECT coalesce(engine, '') FROM information_schema.tables WHERE table_schema = coalesce(?, DATABASE()) AND table_name = ?`,
		sql.NullString{String: parts[0], Valid: len(parts) == 2}, parts[len(parts)-1]).Scan(&isEngine)
	if err != nil && !errors.Is(err, sql.ErrNoRows) { // it may be spelled in another case
		return false, err
	}
	if err == nil && isEngine != "InnoDB" {
		return false, &InvalidError{"RowSpec.Table", fmt.Sprintf("%s is not an InnoDB table; ALTER TABLE %s ENGINE = InnoDB", spec.Table, spec.Table)}
	}
	var triggers int
	err = db.QueryRowContext(ctx, `
SELECT count(*) FROM information_schema.triggers
WHERE event_object_schema = coalesce(?, DATABASE()) AND event_object_table = ? AND event_manipulation = 'UPDATE'`,
		sql.NullString{String: parts[0], Valid: len(parts) == 2}, parts[len(parts)-1]).Scan(&triggers)
	if err != nil {
		return false, err
	}
	if triggers > 0 && spec.Owner == "" {
		return false, &InvalidError{"RowSpec.Owner", fmt.Sprintf("is empty, but %s has an UPDATE trigger, which hides the token; "+
			"ALTER TABLE %s ADD locked_by VARBINARY(255) NULL", spec.Table, spec.Table)}
	}
	columns, err := show(ctx, db, `FULL COLUMNS`, spec)
	if err != nil {
		return false, err
	}
	for _, c := range columns {
		name, is, extra, nullable := c["Field"], strings.ToLower(c["Type"]), strings.ToLower(c["Extra"]), c["Null"] == "YES"
		alter := func(field, because, to string) error {
			return &InvalidError{"RowSpec." + field, fmt.Sprintf("%s is %s%s; ALTER TABLE %s MODIFY %s %s", name, is, because, spec.Table, name, to)}
		}
		switch {
		case strings.EqualFold(name, spec.Key):
			uuid = is == "uuid"
			if strings.Contains(is, "zerofill") {
				return false, alter("Key", ", so that 7 is written 0000000007", "BIGINT UNSIGNED NOT NULL")
			}
			exact := []string{"", "utf8mb4_bin", "utf8mb4_nopad_bin", "utf8mb4_0900_bin"} // "": no text
			if of := c["Collation"]; !slices.Contains(exact, of) {
				return false, alter("Key", " of collation "+of+", which takes different keys for the same, or is not UTF-8", is+" COLLATE utf8mb4_bin")
			}
		case strings.EqualFold(name, spec.LockedAt):
			switch {
			case is != "datetime(6)":
				return false, alter("LockedAt", ", which does not hold microseconds", "DATETIME(6) NULL")
			case !nullable:
				return false, alter("LockedAt", " NOT NULL, and NULL is what a free row has", "DATETIME(6) NULL")
			case strings.Contains(extra, "on update"), strings.Contains(extra, "generated"):
				return false, alter("LockedAt", " "+extra+", and only locks may change it", "DATETIME(6) NULL")
			}
		case strings.EqualFold(name, spec.Owner):
			fits := is == "varbinary(255)" || is == "varchar(255)" && strings.HasPrefix(c["Collation"], "utf8mb4_")
			if !fits || !nullable {
				return false, alter("Owner", ", and would not hold 255 bytes of UTF-8, or NULL", "VARBINARY(255) NULL")
			}
		}
	}
	return uuid, nil
}
