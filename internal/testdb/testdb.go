// Package testdb gives the tests of this module real databases, each test a fresh and empty one.
//
// PostgreSQL and MariaDB (or MySQL) are servers of the test process's own, started from the binaries installed on the machine at
// the first use, in a temporary folder, on a free port, without fsync. They are stopped and their folder is removed when the test
// process ends, however it ends: by return, panic, os.Exit or kill -9. With LOCKER_TEST_POSTGRES (a postgres:// URL) or
// LOCKER_TEST_MYSQL (a go-sql-driver DSN) in the environment that server is used instead. No other server is ever touched.
//
// An engine that is not there is skipped, aloud; LOCKER_TEST_REQUIRE=postgres,mysql makes it a failure. Engines beyond one machine
// (Galera) are started only if LOCKER_TEST_ENGINES=galera names them.
//
// Parameters of a DSN are written "name=value", the value plain: it is escaped here. They replace those of the same name, and for
// SQLite of the same pragma, "_pragma=busy_timeout(100)".
package testdb

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib" // database/sql driver "pgx"
	_ "modernc.org/sqlite"             // database/sql driver "sqlite"
)

// An Engine is a database to run tests on. Get one from Engines, Postgres, MySQL, SQLite, SQLitePlain or Server.Engine.
type Engine struct {
	Name   string // "postgres", "mysql" (MariaDB too) or "sqlite"
	Driver string // the name that sql.Open takes

	server func() (string, error) // the DSN to make schemas from; nil for SQLite
	params []string
}

// Engines returns every engine there is here, and logs which are not and why.
func Engines(t testing.TB) []Engine {
	t.Helper()
	var all []Engine
	for _, k := range []*kind{postgres, maria} {
		if e, err := k.engine(); err == nil {
			all = append(all, e)
		} else if k.required() {
			t.Fatalf("testdb: %s is required: %v", k.name, err)
		} else {
			t.Logf("testdb: no tests on %s: %v", k.name, err)
		}
	}
	return append(all, SQLite(t))
}

// Postgres returns PostgreSQL, or skips the test where there is none.
func Postgres(t testing.TB) Engine { t.Helper(); return postgres.need(t) }

// MySQL returns MariaDB or MySQL, or skips the test where there is none.
func MySQL(t testing.TB) Engine { t.Helper(); return maria.need(t) }

// SQLite returns SQLite as the documentation says to open it: a busy timeout, write-ahead log, synchronous=NORMAL.
func SQLite(t testing.TB) Engine {
	e := SQLitePlain(t)
	e.params = []string{"_pragma=busy_timeout(5000)", "_pragma=journal_mode(WAL)", "_pragma=synchronous(NORMAL)"}
	return e
}

// SQLitePlain returns SQLite as somebody opens it who read nothing: no pragma set.
func SQLitePlain(testing.TB) Engine { return Engine{Name: "sqlite", Driver: "sqlite"} }

// DSN returns the DSN of a fresh, empty database for this test: a schema of its own in PostgreSQL (by search_path), a database in
// MySQL, a file in SQLite. It is dropped at the test's end.
func (e Engine) DSN(t testing.TB, params ...string) string {
	t.Helper()
	if e.Name == "sqlite" {
		path := url.URL{Path: filepath.ToSlash(filepath.Join(t.TempDir(), "test.db"))} // the # of a subtest would end it
		return withParams("file:"+path.EscapedPath(), slices.Concat(e.params, params)...)
	}
	base, err := e.server()
	if err != nil {
		t.Fatalf("testdb: %s: %v", e.Name, err)
	}
	name := "locker_" + strings.ToLower(rand.Text())
	create, drop, dsn := "CREATE SCHEMA "+name, "DROP SCHEMA "+name+" CASCADE", withParams(base, "search_path="+name)
	if e.Name == "mysql" {
		create, drop = "CREATE DATABASE "+name, "DROP DATABASE "+name
		dsn = editMySQL(t, base, func(c *mysql.Config) { c.DBName = name })
	}
	if err := execute(e.Driver, base, create); err != nil {
		t.Fatalf("testdb: %s: %s: %v", e.Name, create, err)
	}
	t.Cleanup(func() {
		// A test may leave a server that is down, or a transaction open: nothing that its result hangs on.
		if err := execute(e.Driver, base, drop); err != nil {
			t.Logf("testdb: %s: %s: %v", e.Name, drop, err)
		}
	})
	return withParams(dsn, params...)
}

// Open returns a pool on a fresh, empty database. It is closed at the test's end.
func (e Engine) Open(t testing.TB, params ...string) *sql.DB {
	t.Helper()
	return Open(t, e.Driver, e.DSN(t, params...))
}

// Open is sql.Open for a test: the pool is closed at the test's end.
func Open(t testing.TB, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatalf("testdb: %v", err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Logf("testdb: closing: %v", err)
		}
	})
	return db
}

// engine says what tests are to run on: the server that the environment names, else the process's own, started at the first DSN.
func (k *kind) engine() (Engine, error) {
	e := Engine{Name: k.name, Driver: k.driver}
	if dsn := os.Getenv(k.env); dsn != "" {
		e.server = func() (string, error) { return dsn, nil }
		return e, nil
	}
	if _, err := k.find(); err != nil {
		return e, fmt.Errorf("%w; install it or set %s", err, k.env)
	}
	e.server = func() (string, error) {
		s, err := k.shared()
		if err != nil {
			return "", err
		}
		return k.dsn(s.port), nil
	}
	return e, nil
}

func (k *kind) need(t testing.TB) Engine {
	t.Helper()
	e, err := k.engine()
	if err != nil {
		k.missing(t, err)
	}
	return e
}

func (k *kind) missing(t testing.TB, err error) {
	t.Helper()
	if k.required() {
		t.Fatalf("testdb: %s is required: %v", k.name, err)
	}
	t.Skipf("testdb: %v", err)
}

func (k *kind) required() bool {
	return slices.Contains(strings.Split(os.Getenv("LOCKER_TEST_REQUIRE"), ","), k.name)
}

// execute runs statements on a connection of its own: a pool kept open would be a leak in the eyes of a test that looks for them.
func execute(driver, dsn string, statements ...string) error {
	// The limit is for a drop that waits for a transaction which a failed test left open.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return err
	}
	for _, s := range statements {
		if _, err = db.ExecContext(ctx, s); err != nil {
			break
		}
	}
	return errors.Join(err, db.Close())
}

// withParams adds params to the query part of a DSN, in place of those with the same name, or of the same pragma.
func withParams(dsn string, params ...string) string {
	head, query, _ := strings.Cut(dsn, "?")
	all := strings.FieldsFunc(query, func(r rune) bool { return r == '&' })
	for _, p := range params {
		name, value, _ := strings.Cut(p, "=")
		p = name + "=" + plainer.Replace(url.QueryEscape(value))
		if name += "="; name == "_pragma=" {
			name, _, _ = strings.Cut(p, "(")
		}
		all = append(slices.DeleteFunc(all, func(s string) bool { return strings.HasPrefix(s, name) }), p)
	}
	if len(all) == 0 {
		return head
	}
	return head + "?" + strings.Join(all, "&")
}

// pgx does not read + as a space. Parentheses need no escape, and without it the DSN of SQLite can be read.
var plainer = strings.NewReplacer("+", "%20", "%28", "(", "%29", ")")

func editMySQL(t testing.TB, dsn string, edit func(*mysql.Config)) string {
	t.Helper()
	c, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatalf("testdb: %v", err)
	}
	edit(c)
	return c.FormatDSN()
}
