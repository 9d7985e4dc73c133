package locker_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/locker-go/locker"
)

// small is a dialect as a third party would begin one: text, none of the optional statements. The engine here is SQLite again, so
// that the example runs anywhere.
type small struct{}

func (small) Name() string { return "small" }

func (small) Quote(ident string) string { return "[" + ident + "]" }

func (small) Retryable(err error) bool {
	var e interface{ Code() int }
	return errors.As(err, &e) && e.Code()&0xff == 5 // SQLITE_BUSY: the statement did nothing
}

func (small) Statements(table string) locker.Statements {
	const row = ` RETURNING resource, owner, acquired_at AS acquired, expires_at AS expires, :now AS now`
	const grant = ` WHERE resource = :resource AND owner = :owner AND :token IN (0, acquired_at) AND expires_at > :now`
	const idle = ` expires_at <= :now AND acquired_at < :now - :idle`
	const read = `SELECT resource, owner, acquired_at AS acquired, expires_at AS expires, :now AS now FROM `
	return locker.Statements{
		Bind:      sqlx.QUESTION,
		Prepare:   true,
		ReadFirst: true, // this engine has one write lock for all
		Create:    []string{`CREATE TABLE IF NOT EXISTS ` + table + ` (resource TEXT PRIMARY KEY, owner TEXT, acquired_at INTEGER, expires_at INTEGER)`},
		Acquire: `INSERT INTO ` + table + ` AS l VALUES (:resource, :owner, :now, :now + :ttl)
			ON CONFLICT (resource) DO UPDATE SET
				owner = excluded.owner, acquired_at = max(l.acquired_at + 1, :now), expires_at = excluded.expires_at
			WHERE l.owner = excluded.owner OR l.expires_at <= :now` + row,
		Renew:    `UPDATE ` + table + ` SET expires_at = :now + :ttl` + grant + row,
		Release:  `UPDATE ` + table + ` SET owner = '', expires_at = 0` + grant + row,
		Handover: `UPDATE ` + table + ` SET owner = :next, acquired_at = max(acquired_at + 1, :now), expires_at = :now + :ttl` + grant + row,
		Get:      read + table + ` WHERE resource = :resource`,
		List:     read + table + ` WHERE resource > :after AND expires_at > :now ORDER BY resource LIMIT :limit`,
		Idle:     `SELECT resource FROM ` + table + ` WHERE resource > :after AND` + idle + ` ORDER BY resource LIMIT :limit`,
		Purge:    `DELETE FROM ` + table + ` WHERE resource IN (SELECT value FROM json_each(:list)) AND` + idle,
	}
}

// A dialect is a page of SQL. Prove it with lockertest.Run, as TestTheSmallDialectPassesTheSuite does with this one.
func ExampleDialect() {
	db, _ := sql.Open("sqlite", ":memory:")
	defer db.Close()
	db.SetMaxOpenConns(1)
	ctx := context.Background()

	table, err := locker.New(db, small{})
	if err == nil {
		err = table.CreateTable(ctx)
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	first, _ := table.Acquire(ctx, "report", "me", time.Minute)
	_, err = table.Acquire(ctx, "report", "you", time.Minute)
	fmt.Println(errors.Is(err, locker.ErrHeld))
	_ = table.Release(ctx, first)
	second, _ := table.Acquire(ctx, "report", "you", time.Minute)
	fmt.Println(second.Owner, second.Token > first.Token)
	// Output:
	// true
	// you true
}
