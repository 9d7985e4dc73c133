package locker_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/locker-go/locker"
	"github.com/locker-go/locker/lockertest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func Example() {
	db, ctx := openDatabase(), context.Background()

	table, err := locker.New(db, locker.SQLite()) // or locker.Postgres(), locker.MySQL()
	check(err)
	check(table.CreateTable(ctx)) // or put table.DDL() into a migration
	session, err := locker.NewSession(table)
	check(err)
	defer session.Close(ctx)

	err = session.Do(ctx, "invoice:7", func(ctx context.Context, lease *locker.Lease) error {
		return charge(ctx, lease.Token()) // ctx ends before the lease does
	})
	check(err)
	// Output: charged
}

func ExampleSession_TryDo() {
	table, ctx := openTable(), context.Background()
	session, _ := locker.NewSession(table, locker.WithTTL(time.Minute))
	defer session.Close(ctx)

	// On ten nodes with skewed clocks this runs once a night: the lock stays for at least ten minutes.
	ran, err := session.TryDo(ctx, "cron:billing", func(ctx context.Context, _ *locker.Lease) error {
		return nil
	}, locker.WithMinHold(10*time.Minute))
	fmt.Println(ran, err)

	ran, err = session.TryDo(ctx, "cron:billing", func(context.Context, *locker.Lease) error { return nil })
	fmt.Println(ran, err)
	// Output:
	// true <nil>
	// false <nil>
}

func ExampleSession_Lock() {
	table, ctx := openTable(), context.Background()
	session, _ := locker.NewSession(table)
	defer session.Close(ctx)

	lease, err := session.Lock(ctx, "invoice:7", locker.WithMaxWait(10*time.Second))
	if errors.Is(err, locker.ErrHeld) {
		fmt.Println("somebody else is at it:", err)
		return
	}
	defer lease.Release(ctx)
	work, cancel := lease.Context(ctx) // ends, with a *LostError as its cause, if the lease may no longer be trusted
	defer cancel()
	fmt.Println(work.Err(), lease.Err())
	// Output: <nil> <nil>
}

func ExampleTable() {
	table, ctx := openTable(), context.Background()

	// An owner for each acquire: a fixed one, such as a host name, would exclude nobody on that host.
	rec, err := table.Acquire(ctx, "user:42", "web-1/request-9f3c", 30*time.Second)
	check(err)
	_, err = table.Acquire(ctx, "user:42", "web-2/request-11aa", 30*time.Second)
	var held *locker.HeldError
	fmt.Println(errors.As(err, &held) && held.Holder.Owner == "web-1/request-9f3c")

	rec, err = table.Renew(ctx, rec, time.Minute)
	check(err)
	check(table.Release(ctx, rec))
	_, err = table.Get(ctx, "user:42")
	fmt.Println(errors.Is(err, locker.ErrNotHeld))
	// Output:
	// true
	// true
}

// A downstream that knows the highest token it has seen refuses a stale holder: one condition in the UPDATE.
func ExampleLease_Token() {
	db, table, ctx := openDatabase(), openTable(), context.Background()
	_, err := db.Exec(`CREATE TABLE balance (account TEXT PRIMARY KEY, cents INTEGER, token INTEGER); INSERT INTO balance VALUES ('a', 0, 0)`)
	check(err)
	write := func(cents, token int64) int64 {
		res, err := db.Exec(`UPDATE balance SET cents = ?, token = ? WHERE account = 'a' AND token <= ?`, cents, token, token)
		check(err)
		n, _ := res.RowsAffected()
		return n
	}
	stale, err := table.Acquire(ctx, "account:a", "stalled", time.Millisecond)
	check(err)
	fresh, err := table.Acquire(ctx, "account:a", "stalled", time.Minute)
	check(err)
	fmt.Println(write(100, fresh.Token), write(50, stale.Token))
	// Output: 1 0
}

// The tests of code that takes a locker.Locker need no database.
func ExampleNewSession_test() {
	session, _ := locker.NewSession(lockertest.NewMemory())
	defer session.Close(context.Background())
	lease, err := session.TryLock(context.Background(), "anything")
	fmt.Println(err, lease.Record().Resource)
	// Output: <nil> anything
}

func openDatabase() *sql.DB {
	db, err := sql.Open("sqlite", ":memory:")
	check(err)
	db.SetMaxOpenConns(1)
	opened = append(opened, db)
	return db
}

var opened []*sql.DB

func openTable() *locker.Table {
	table, err := locker.New(openDatabase(), locker.SQLite())
	check(err)
	check(table.CreateTable(context.Background()))
	return table
}

func charge(context.Context, int64) error {
	fmt.Println("charged")
	return nil
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func TestTheSmallDialectPassesTheSuite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "small.db")
	lockertest.Run(t, func(t *testing.T) locker.Locker {
		db, err := sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(WAL)&_pragma=synchronous(OFF)&_pragma=busy_timeout(100)")
		require.NoError(t, err)
		t.Cleanup(func() { db.Close() })
		db.SetMaxOpenConns(4)
		db.SetMaxIdleConns(4)
		table, err := locker.New(db, small{})
		require.NoError(t, err)
		require.NoError(t, table.CreateTable(t.Context()))
		return table
	})
}

// What the README shows is what is compiled and run here.
func TestTheREADMEShowsTheExample(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	_, body, _ := strings.Cut(string(source), "func Example() {\n")
	body, _, _ = strings.Cut(body, "\t// Output")
	_, body, _ = strings.Cut(body, "\n\n") // what comes before the first blank line is the test's
	assert.Contains(t, string(readme), strings.ReplaceAll(body, "\n\t", "\n")[1:])
}
