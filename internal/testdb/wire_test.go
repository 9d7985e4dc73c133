package testdb

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var inserts = map[string]string{"postgres": "INSERT INTO things VALUES ($1)", "mysql": "INSERT INTO things VALUES (?)"}

// overWire returns a Wire and two pools on one fresh database: through the Wire, on one connection, and past it.
func overWire(t *testing.T, e Engine, params ...string) (w *Wire, db, direct *sql.DB) {
	dsn := e.DSN(t, params...)
	w = Proxy(t, dsn)
	db, direct = Open(t, e.Driver, w.Through(dsn)), Open(t, e.Driver, dsn)
	db.SetMaxOpenConns(1)
	require.NoError(t, db.Ping())
	require.NoError(t, db.Ping()) // pgx asks a new connection once more before it is used again
	_, err := direct.Exec("CREATE TABLE things (id INT PRIMARY KEY)")
	require.NoError(t, err)
	return w, db, direct
}

func TestRoundTripsAreCounted(t *testing.T) {
	servers(t, func(t *testing.T, e Engine) {
		w, db, _ := overWire(t, e)
		insert := inserts[e.Name]
		trips := func(f func() error) int {
			w.Reset()
			require.NoError(t, f())
			return w.RoundTrips()
		}
		exec := func(query string, args ...any) func() error {
			return func() error { _, err := db.Exec(query, args...); return err }
		}
		require.Equal(t, 1, trips(exec("DELETE FROM things")))
		require.Equal(t, 2, trips(exec(insert, 1)), "prepare and execute")
		again := 2
		if e.Name == "postgres" {
			again = 1 // pgx keeps what it has prepared
		}
		require.Equal(t, again, trips(exec(insert, 2)))

		stmt, err := db.Prepare(insert)
		require.NoError(t, err)
		require.Equal(t, 1, trips(func() error { _, err := stmt.Exec(3); return err }))
		require.NoError(t, stmt.Close())

		inPieces := "DELETE FROM things WHERE id < 0 /* " + strings.Repeat("x", 300_000) + " */"
		require.Equal(t, 1, trips(exec(inPieces)))
		require.Equal(t, 0, trips(db.Close))
	})
}

func TestDropRepliesLosesTheAnswerNotTheWork(t *testing.T) {
	params := map[string][]string{"postgres": {"default_query_exec_mode=exec"}, "mysql": {"interpolateParams=true"}}
	servers(t, func(t *testing.T, e Engine) {
		for name, p := range map[string][]string{"default": nil, "one trip": params[e.Name]} {
			t.Run(name, func(t *testing.T) {
				w, db, direct := overWire(t, e, p...)
				db.SetMaxIdleConns(0)
				w.DropReplies(true) // with no connection yet: the handshake and preparing pass
				_, err := db.Exec(inserts[e.Name], 1)
				require.Error(t, err)
				require.Equal(t, 1, queryInt(t, direct, "SELECT count(*) FROM things"))
				w.DropReplies(false)
				_, err = db.Exec(inserts[e.Name], 2)
				require.NoError(t, err)
			})
		}
	})
}

func TestCutClosesConnectionsAndLetsNewOnesIn(t *testing.T) {
	servers(t, func(t *testing.T, e Engine) {
		w, db, _ := overWire(t, e)
		tx, err := db.Begin()
		require.NoError(t, err)
		w.Cut()
		require.Error(t, tx.Commit())
		require.Equal(t, 0, queryInt(t, db, "SELECT count(*) FROM things"))
	})
}

func TestHangIsABlackHoleThatHeals(t *testing.T) {
	servers(t, func(t *testing.T, e Engine) {
		w, db, direct := overWire(t, e)
		count := func() int { return queryInt(t, direct, "SELECT count(*) FROM things") }

		w.Hang(true)
		done := make(chan error, 1)
		go func() { _, err := db.Exec("INSERT INTO things VALUES (1)"); done <- err }()
		select {
		case err := <-done:
			t.Fatal("an answer out of a black hole:", err)
		case <-time.After(100 * time.Millisecond):
		}
		require.Equal(t, 0, count())
		w.Hang(false) // late, but it arrives
		require.NoError(t, <-done)
		require.Equal(t, 1, count())

		w.Hang(true)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := db.ExecContext(ctx, "INSERT INTO things VALUES (2)")
		require.Error(t, err)
		require.Error(t, db.PingContext(ctx), "a new connection gets through")
		w.Cut() // lost for good
		w.Hang(false)
		require.NoError(t, db.Ping())
		require.Equal(t, 1, count())
	})
}
