package locker_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/locker-go/locker"
	"github.com/locker-go/locker/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What the engines do when two sessions meet at one row, each as two connections show it. The suite has the rest: names, sentinels,
// full leases behind a row lock, tokens over deleted rows.

// waiting waits until another session waits for a lock of the database.
func (tb table) waiting(t *testing.T) {
	t.Helper()
	waiting(t, tb.e, tb.db)
}

func waiting(t *testing.T, e testdb.Engine, db *sql.DB) {
	t.Helper()
	query := map[string]string{
		"postgres": `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()`,
		"mysql":    `SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'Innodb_row_lock_current_waits'`,
	}[e.Name]
	require.Eventually(t, func() bool { return number(t, db, query) > 0 }, 30*time.Second, 5*time.Millisecond, "nobody waits")
}

func begin(t *testing.T, db *sql.DB) *sql.Tx {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { tx.Rollback() })
	return tx
}

func execute(t *testing.T, db interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}, query string, args ...any) {
	t.Helper()
	_, err := db.ExecContext(t.Context(), query, args...)
	require.NoError(t, err, query)
}

func number(t *testing.T, db interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}, query string) (n int64) {
	t.Helper()
	require.NoError(t, db.QueryRowContext(t.Context(), query).Scan(&n), query)
	return n
}

// A claim that had to wait behind an uncommitted DELETE was computed before the wait: of its lease nothing, or little, was left.
func TestAClaimBehindAnUncommittedDeleteIsAFullLease(t *testing.T) {
	for _, e := range servers(t) {
		t.Run(e.Name, func(t *testing.T) {
			const ttl = time.Second
			tb := fresh(t, e).table(t)
			old, err := tb.Acquire(t.Context(), "r", "old", time.Millisecond)
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				_, err := tb.Get(t.Context(), "r")
				return errors.Is(err, locker.ErrNotHeld)
			}, time.Minute, time.Millisecond)
			for _, wait := range []time.Duration{ttl / 2, 2 * ttl} {
				tx := begin(t, tb.db)
				execute(t, tx, "DELETE FROM distributed_locks")
				got := make(chan locker.Record, 1)
				go func() {
					rec, err := tb.Acquire(t.Context(), "r", "new", ttl)
					assert.NoError(t, err)
					got <- rec
				}()
				tb.waiting(t)
				time.Sleep(wait) // part of what is tested: it is taken off the lease
				require.NoError(t, tx.Commit())
				rec := <-got
				now, err := tb.Get(t.Context(), "r")
				require.NoError(t, err)
				assert.Equal(t, rec.Token, now.Token)
				assert.Greater(t, now.Remaining, ttl*6/10)
				assert.LessOrEqual(t, rec.Remaining, ttl)
				assert.Greater(t, rec.Token, old.Token)
				require.NoError(t, tb.Release(t.Context(), rec))
			}
		})
	}
}

// On PostgreSQL a refused ON CONFLICT DO UPDATE locks the row: 96 bytes of WAL and a flush for each.
func TestARefusedAcquireWritesNothing(t *testing.T) {
	for _, c := range []struct {
		name   string
		args   []string
		writes string // a number that moves with every write
	}{
		{"postgres", []string{"-c", "wal_level=minimal", "-c", "max_wal_senders=0", "-c", "autovacuum=off"}, `SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn`},
		{"mysql", []string{"--innodb-purge-threads=1"}, `SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'Innodb_lsn_current'`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := testdb.Start(t, c.name, testdb.Options{Args: c.args})
			tb := database{s.Engine(), s.DSN()}.table(t)
			rec, err := tb.Acquire(t.Context(), "r", "holder", time.Hour)
			require.NoError(t, err)
			rows := database{s.Engine(), s.DSN()}.rows(t, tb.db, "BIGINT", users("locked_by", time.Hour))
			execute(t, tb.db, "INSERT INTO users (id) VALUES (7)")
			_, err = rows.Acquire(t.Context(), "7", "holder", time.Hour)
			require.NoError(t, err)
			refuse := func() {
				for i := range 100 {
					_, err := tb.Acquire(t.Context(), "r", fmt.Sprint("loser ", i), time.Hour)
					require.ErrorIs(t, err, locker.ErrHeld)
					_, err = rows.Acquire(t.Context(), "7", fmt.Sprint("loser ", i), time.Hour)
					require.ErrorIs(t, err, locker.ErrHeld)
				}
			}
			refuse()
			var moved int64
			for range 20 { // the server writes a little on its own, now and then
				before := number(t, tb.db, c.writes)
				refuse()
				if moved = number(t, tb.db, c.writes) - before; moved == 0 {
					break
				}
			}
			assert.Zero(t, moved, "bytes for 200 refused acquires")
			before := number(t, tb.db, c.writes)
			_, err = tb.Renew(t.Context(), rec, time.Hour)
			require.NoError(t, err)
			assert.Greater(t, number(t, tb.db, c.writes), before, "the number does move with a write")
		})
	}
	t.Run("sqlite", func(t *testing.T) { // not even the file's one write lock
		for _, journal := range []string{"DELETE", "WAL"} {
			tb := fresh(t, testdb.SQLitePlain(t), "_pragma=journal_mode("+journal+")").table(t)
			_, err := tb.Acquire(t.Context(), "r", "holder", time.Hour)
			require.NoError(t, err)
			unblock, err := tb.Block(t.Context(), "r") // BEGIN IMMEDIATE
			require.NoError(t, err)
			_, err = tb.Acquire(t.Context(), "r", "loser", time.Hour)
			assert.ErrorIs(t, err, locker.ErrHeld, journal)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			_, err = tb.Acquire(ctx, "free", "waits", time.Hour)
			assert.ErrorIs(t, err, context.DeadlineExceeded, "a claim does need it")
			unblock()
		}
	})
}

// The guard that PostgreSQL needs made 3,337 deadlocks in 3 s on MariaDB; the plain upsert makes none.
func TestContendedAcquiresMakeNoDeadlocks(t *testing.T) {
	s := testdb.Start(t, "mysql", testdb.Options{})
	tb := database{s.Engine(), s.DSN()}.table(t)
	const deadlocks = `SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'Innodb_deadlocks'`
	before := number(t, tb.db, deadlocks)
	var all sync.WaitGroup
	for g := range 16 {
		all.Go(func() {
			for range 200 {
				rec, err := tb.Acquire(t.Context(), "hot", fmt.Sprint(g), time.Minute)
				if err == nil {
					assert.NoError(t, tb.Release(t.Context(), rec))
				} else {
					assert.ErrorIs(t, err, locker.ErrHeld)
				}
			}
		})
	}
	all.Wait()
	assert.Zero(t, number(t, tb.db, deadlocks)-before)
}

// The winner commits while the loser's statement runs: then the loser sees neither a grant nor a holder, and above READ COMMITTED
// gets 40001. It must be refused by the winner's name all the same.
func TestALoserWhoMeetsTheWinnersCommitIsRefused(t *testing.T) {
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			tb := fresh(t, testdb.Postgres(t), "default_transaction_isolation="+level).table(t)
			for _, name := range []string{"fresh", "released"} {
				if name == "released" {
					rec, err := tb.Acquire(t.Context(), name, "old", time.Hour)
					require.NoError(t, err)
					require.NoError(t, tb.Release(t.Context(), rec))
				}
				tx := begin(t, tb.db)
				execute(t, tx, `INSERT INTO distributed_locks VALUES ($1, 'winner', clock_timestamp(), clock_timestamp() + interval '1 hour')
					ON CONFLICT (resource) DO UPDATE SET owner = excluded.owner, acquired_at = excluded.acquired_at, expires_at = excluded.expires_at`, name)
				refused := make(chan error, 1)
				go func() {
					_, err := tb.Acquire(t.Context(), name, "loser", time.Hour)
					refused <- err
				}()
				tb.waiting(t)
				require.NoError(t, tx.Commit())
				var held *locker.HeldError
				require.ErrorAs(t, <-refused, &held, name)
				assert.Equal(t, "winner", held.Holder.Owner)
			}
		})
	}
}

// Renewals of one instant change no value and count no row; the expiry itself is the answer.
func TestRenewalsOfOneInstantAreRenewals(t *testing.T) {
	tb := fresh(t, testdb.MySQL(t), "timestamp=1796000000.25").table(t)
	var recs []locker.Record
	for i := range 5 {
		rec, err := tb.Acquire(t.Context(), fmt.Sprint(i), "o", time.Hour)
		require.NoError(t, err)
		recs = append(recs, rec)
	}
	for range 10 {
		rec, err := tb.Renew(t.Context(), recs[0], time.Hour)
		require.NoError(t, err)
		assert.Equal(t, recs[0].ExpiresAt, rec.ExpiresAt)
		batch, err := tb.RenewBatch(t.Context(), recs, time.Hour)
		require.NoError(t, err)
		assert.Len(t, batch, 5)
	}
	// The clock stands still, and the tokens rise.
	last := recs[0]
	for range 10 {
		rec, err := tb.Acquire(t.Context(), "0", "o", time.Hour)
		require.NoError(t, err)
		assert.Equal(t, last.Token+1, rec.Token)
		last = rec
	}
	require.NoError(t, tb.Release(t.Context(), last))
}

// UNIX_TIMESTAMP and FROM_UNIXTIME end in 2038, and a lease of ten years may not.
func TestALeaseMayEndAfter2038(t *testing.T) {
	tb := fresh(t, testdb.MySQL(t), "timestamp=2145916800").table(t)
	rec, err := tb.Acquire(t.Context(), "r", "o", locker.MaxTTL)
	require.NoError(t, err)
	assert.Equal(t, 2047, rec.ExpiresAt.Year())
	rec, err = tb.Renew(t.Context(), rec, locker.MaxTTL)
	require.NoError(t, err)
	assert.Equal(t, 2047, rec.ExpiresAt.Year())
	seen, err := tb.Get(t.Context(), "r")
	require.NoError(t, err)
	assert.Equal(t, rec.ExpiresAt, seen.ExpiresAt)
}

// A call that ended with an error may have taken the lock all the same: the same owner asks again.
func TestAnErroredAcquireIsUnknown(t *testing.T) {
	for _, e := range servers(t) {
		t.Run(e.Name, func(t *testing.T) {
			d := fresh(t, e)
			direct := d.table(t)
			w := testdb.Proxy(t, d.dsn)
			tb := database{e, w.Through(d.dsn)}.table(t)
			_, err := tb.Acquire(t.Context(), "warm", "o", time.Hour)
			require.NoError(t, err)

			w.DropReplies(true)
			_, err = tb.Acquire(t.Context(), "r", "o", time.Hour)
			require.Error(t, err)
			for _, verdict := range []error{locker.ErrHeld, locker.ErrNotHeld, locker.ErrNotOwner} {
				assert.NotErrorIs(t, err, verdict)
			}
			w.DropReplies(false)
			taken, err := direct.Get(t.Context(), "r")
			require.NoError(t, err, "it took effect")
			rec, err := tb.Acquire(t.Context(), "r", "o", time.Hour)
			require.NoError(t, err)
			assert.Greater(t, rec.Token, taken.Token)

			w.DropReplies(true)
			_, err = tb.Renew(t.Context(), rec, 2*time.Hour)
			require.Error(t, err)
			w.DropReplies(false)
			rec, err = tb.Renew(t.Context(), rec, 2*time.Hour)
			require.NoError(t, err)

			w.DropReplies(true)
			require.Error(t, tb.Release(t.Context(), rec))
			w.DropReplies(false)
			assert.ErrorIs(t, tb.Release(t.Context(), rec), locker.ErrNotHeld)
		})
	}
}

// One row that a transaction held in share mode stopped a batch of 1,000 renewals for 2.7 s; batches that locked in different orders
// deadlocked; and without its hints the batch scanned the table, and then locked all of it.
func TestABatchWaitsForNoRowAndTouchesOnlyItsOwn(t *testing.T) {
	for _, e := range servers(t) {
		t.Run(e.Name, func(t *testing.T) {
			tb := fresh(t, e).table(t)
			var recs []locker.Record
			for i := range 50 {
				rec, err := tb.Acquire(t.Context(), fmt.Sprintf("r%02d", i), "o", time.Hour)
				require.NoError(t, err)
				recs = append(recs, rec)
			}
			tx := begin(t, tb.db)
			execute(t, tx, "SELECT owner FROM distributed_locks WHERE resource = 'r07' FOR UPDATE")
			execute(t, tx, "SELECT owner FROM distributed_locks WHERE resource = 'r33' "+map[string]string{"postgres": "FOR SHARE", "mysql": "LOCK IN SHARE MODE"}[e.Name])

			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			renewed, err := tb.RenewBatch(ctx, recs, 2*time.Hour)
			require.NoError(t, err)
			assert.Len(t, renewed, 48, "all but those two")
			renewed, err = tb.RenewBatch(ctx, recs[8:20], 3*time.Hour)
			require.NoError(t, err)
			assert.Len(t, renewed, 12)
			for _, r := range renewed {
				assert.Greater(t, r.Remaining, 2*time.Hour)
			}
			require.NoError(t, tx.Rollback())

			backwards := slices.Clone(recs)
			slices.Reverse(backwards)
			var all sync.WaitGroup
			for g := range 8 {
				all.Go(func() {
					for range 20 {
						some := [][]locker.Record{recs, backwards}[g%2]
						_, err := tb.RenewBatch(ctx, some, time.Hour)
						assert.NoError(t, err)
					}
				})
			}
			all.Wait()
			renewed, err = tb.RenewBatch(ctx, append(recs, recs...), time.Hour)
			require.NoError(t, err)
			assert.Len(t, renewed, 50, "each once")
		})
	}
}

// A batch finds its rows by their names, whatever the planner thinks of the table's size.
func TestABatchDoesNotScanTheTable(t *testing.T) {
	d := fresh(t, testdb.MySQL(t))
	tb := d.table(t)
	tb.db.SetMaxOpenConns(1)
	for _, rows := range []int{2, 3000} {
		execute(t, tb.db, fmt.Sprintf(`INSERT IGNORE INTO distributed_locks SELECT CONCAT('filler ', seq), 'o', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) FROM seq_1_to_%d`, rows))
		rec, err := tb.Acquire(t.Context(), "r", "o", time.Hour)
		require.NoError(t, err)
		execute(t, tb.db, "FLUSH STATUS")
		renewed, err := tb.RenewBatch(t.Context(), []locker.Record{rec}, time.Hour)
		require.NoError(t, err)
		require.Len(t, renewed, 1)
		// Reads of the JSON list and of the derived table count too, each of one row.
		assert.Less(t, number(t, tb.db, `SELECT SUM(variable_value) FROM information_schema.session_status WHERE variable_name IN ('Handler_read_next', 'Handler_read_first', 'Handler_read_rnd_next')`), int64(20))
	}
}

// A release keeps the row: with a deleted row a counter starts anew, and a million cycles made 84 MB.
func TestAHotRowStaysOneRow(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			tb := fresh(t, e).table(t)
			var last int64
			for range 300 {
				rec, err := tb.Acquire(t.Context(), "hot", "o", time.Hour)
				require.NoError(t, err)
				assert.Greater(t, rec.Token, last)
				last = rec.Token
				require.NoError(t, tb.Release(t.Context(), rec))
			}
			assert.EqualValues(t, 1, number(t, tb.db, "SELECT count(*) FROM distributed_locks"))
			if e.Name == "postgres" {
				assert.EqualValues(t, 1, number(t, tb.db, "SELECT count(*) FROM pg_index WHERE indrelid = 'distributed_locks'::regclass"), "a second index costs every renewal")
				var updates, hot int64
				require.Eventually(t, func() bool {
					execute(t, tb.db, "SELECT pg_stat_clear_snapshot()")
					require.NoError(t, tb.db.QueryRowContext(t.Context(), "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'distributed_locks'::regclass").Scan(&updates, &hot))
					return updates >= 599
				}, time.Minute, 100*time.Millisecond, "statistics come late")
				assert.Greater(t, hot, updates*9/10, "heap-only updates")
			}
		})
	}
}

// A failed commit shows after the rows: with a rollback journal a reader stops the commit of a claim that has returned its row already.
func TestACommitThatFailsIsNotAGrant(t *testing.T) {
	d := fresh(t, testdb.SQLitePlain(t), "_pragma=journal_mode(DELETE)")
	tb, other := d.table(t), d.table(t)
	_, err := tb.Acquire(t.Context(), "x", "o", time.Hour)
	require.NoError(t, err)
	reader := begin(t, other.db)
	var n int
	require.NoError(t, reader.QueryRowContext(t.Context(), "SELECT count(*) FROM distributed_locks").Scan(&n))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = tb.Acquire(ctx, "r", "o", time.Hour)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, reader.Rollback())
	_, err = other.Get(t.Context(), "r")
	assert.ErrorIs(t, err, locker.ErrNotHeld)
	_, err = tb.Acquire(t.Context(), "r", "o", time.Hour)
	assert.NoError(t, err)
}

// "database is locked" is not an answer: the call waits for the file as long as its ctx lets it, and no longer.
func TestABusyFileIsWaitedForAsLongAsCtxLets(t *testing.T) {
	for _, timeout := range []string{"0", "100"} {
		t.Run("busy_timeout "+timeout, func(t *testing.T) {
			tb := fresh(t, testdb.SQLitePlain(t), "_pragma=busy_timeout("+timeout+")").table(t)
			rec, err := tb.Acquire(t.Context(), "r", "o", time.Hour)
			require.NoError(t, err)
			unblock, err := tb.Block(t.Context(), "r")
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			begin := time.Now()
			_, err = tb.Renew(ctx, rec, time.Hour)
			assert.ErrorIs(t, err, context.DeadlineExceeded)
			assert.NotErrorIs(t, err, locker.ErrNotHeld)
			assert.Less(t, time.Since(begin), 3*time.Second)
			done := make(chan error)
			go func() {
				_, err := tb.Renew(t.Context(), rec, time.Hour)
				done <- err
			}()
			select {
			case err := <-done:
				t.Fatalf("it did not wait: %v", err)
			case <-time.After(50 * time.Millisecond):
			}
			unblock()
			assert.NoError(t, <-done)
		})
	}
}

// Behind a pool of several connections each has a database in memory of its own, and two owners both win.
func TestADatabaseInMemoryNeedsOneConnection(t *testing.T) {
	db := testdb.Open(t, "sqlite", ":memory:")
	tb, err := locker.New(db, locker.SQLite())
	require.NoError(t, err)
	assert.ErrorContains(t, tb.CreateTable(t.Context()), "SetMaxOpenConns(1)")
	db.SetMaxOpenConns(1)
	assert.NoError(t, tb.CreateTable(t.Context()))
}

// A lease so short that it is over when the answer comes was granted or renewed all the same, once.
func TestAShortLeaseIsGrantedOnce(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			tb := fresh(t, e).table(t)
			for i := range 50 {
				name := fmt.Sprint(i)
				rec := acquire(t, tb, name)
				_, err := tb.Renew(t.Context(), rec, time.Millisecond)
				require.NoError(t, err)
				require.Eventually(t, func() bool {
					_, err := tb.Get(t.Context(), name)
					return errors.Is(err, locker.ErrNotHeld)
				}, time.Minute, time.Millisecond)
			}
			// After a clock that was set back a token lies ahead, and the next one is it + 1.
			execute(t, tb.db, "UPDATE distributed_locks SET acquired_at = acquired_at + "+map[string]string{
				"postgres": "interval '1 hour'", "mysql": "INTERVAL 1 HOUR", "sqlite": "3600000000",
			}[e.Name])
			before := make([]int64, 50)
			for i := range before {
				rec, err := tb.Acquire(t.Context(), fmt.Sprint(i), "o", time.Millisecond)
				require.NoError(t, err)
				before[i] = rec.Token
			}
			for i := range before {
				assert.Equal(t, before[i]+1, acquire(t, tb, fmt.Sprint(i)).Token)
			}
		})
	}
}

// A table that somebody made by hand may take different names for the same, or let one in twice.
func TestAnUnsafeTableIsRefused(t *testing.T) {
	for _, c := range []struct {
		engine func(testing.TB) testdb.Engine
		ddl    string
	}{
		{testdb.MySQL, "resource VARCHAR(255) COLLATE utf8mb4_general_ci PRIMARY KEY, owner VARBINARY(255) NOT NULL, acquired_at DATETIME(6) NOT NULL, expires_at DATETIME(6) NOT NULL"},
		{testdb.MySQL, "resource VARBINARY(255) PRIMARY KEY, owner VARCHAR(255) COLLATE utf8mb4_bin NOT NULL, acquired_at DATETIME(6) NOT NULL, expires_at DATETIME(6) NOT NULL"},
		{testdb.MySQL, "resource VARBINARY(255) NOT NULL, owner VARBINARY(255) NOT NULL, acquired_at DATETIME(6) NOT NULL, expires_at DATETIME(6) NOT NULL"},
		{testdb.MySQL, "resource VARBINARY(255) PRIMARY KEY, owner VARBINARY(255) NOT NULL UNIQUE, acquired_at DATETIME(6) NOT NULL, expires_at DATETIME(6) NOT NULL"},
		{testdb.MySQL, "resource VARBINARY(100) PRIMARY KEY, owner VARBINARY(255) NOT NULL, acquired_at DATETIME(6) NOT NULL, expires_at DATETIME(6) NOT NULL"},
		{testdb.MySQL, "resource VARBINARY(255) PRIMARY KEY, owner VARBINARY(255) NOT NULL, acquired_at DATETIME NOT NULL, expires_at DATETIME(6) NOT NULL"},
		{testdb.Postgres, "resource text PRIMARY KEY, owner varchar(9), acquired_at timestamptz, expires_at timestamptz"},
		{testdb.Postgres, "resource text PRIMARY KEY, owner text, acquired_at timestamp, expires_at timestamp"},
	} {
		db := fresh(t, c.engine(t)).pool(t)
		execute(t, db, "CREATE TABLE distributed_locks ("+c.ddl+")")
		tb, err := locker.New(db, dialect(c.engine(t)))
		require.NoError(t, err)
		assert.ErrorContains(t, tb.CreateTable(t.Context()), "let CreateTable make it", c.ddl)
		execute(t, db, "DROP TABLE distributed_locks")
		assert.NoError(t, tb.CreateTable(t.Context()))
	}
	// Nothing that such a pool writes is ever committed, and everybody would be granted.
	d := fresh(t, testdb.MySQL(t))
	d.table(t)
	uncommitted, err := locker.New(d.with("autocommit=0").pool(t), locker.MySQL())
	require.NoError(t, err)
	assert.ErrorContains(t, uncommitted.CreateTable(t.Context()), "autocommit")
	_, err = uncommitted.Acquire(t.Context(), "r", "o", time.Hour)
	assert.ErrorContains(t, err, "autocommit")
}

func TestTheTableIsMadeUnderAnyServerDefaults(t *testing.T) {
	for _, charset := range []string{"latin1", "utf8mb3", "utf8mb4"} {
		s := testdb.MySQL(t)
		d := fresh(t, s, "explicit_defaults_for_timestamp=0", "sql_mode=''")
		execute(t, d.pool(t), "SET SESSION sql_mode = ''")
		execute(t, d.pool(t), "ALTER DATABASE CHARACTER SET "+charset)
		tb := d.table(t)
		require.NoError(t, tb.CreateTable(t.Context()))
		for _, name := range []string{"job-😀", "job-😁"} {
			rec, err := tb.Acquire(t.Context(), name, "o", time.Hour)
			require.NoError(t, err)
			for range 3 {
				rec, err = tb.Renew(t.Context(), rec, time.Hour)
				require.NoError(t, err)
			}
			seen, err := tb.Get(t.Context(), name)
			require.NoError(t, err)
			assert.Equal(t, name, seen.Resource)
			assert.Equal(t, rec.AcquiredAt, seen.AcquiredAt)
		}
		var name, ddl string
		require.NoError(t, tb.db.QueryRowContext(t.Context(), "SHOW CREATE TABLE distributed_locks").Scan(&name, &ddl))
		assert.NotContains(t, strings.ToUpper(ddl), "ON UPDATE")
	}
}

// The clock of the server is an hour off the client's: nobody notices.
func TestConformanceWithTheServersClockOff(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	for _, engine := range []string{"postgres", "mysql"} {
		t.Run(engine, func(t *testing.T) {
			s := testdb.Start(t, engine, testdb.Options{Clock: "+1h"})
			d := database{s.Engine(), s.DSN()}
			rec := acquire(t, d.table(t), "r")
			assert.WithinDuration(t, time.Now().Add(2*time.Hour), rec.ExpiresAt, time.Minute)
			d.run(t)
		})
	}
}

// The clock is set back by an hour in mid-run, and stands still: tokens go on rising, and leases are as long as ever.
func TestTokensRiseWhenTheClockIsSetBack(t *testing.T) {
	for name, start := range map[string]func(*testing.T) (tb table, back func() table){
		"postgres": func(t *testing.T) (table, func() table) {
			s := testdb.Start(t, "postgres", testdb.Options{Faketime: true})
			tb := database{s.Engine(), s.DSN()}.table(t)
			return tb, func() table { s.SetClock("-1h"); return tb }
		},
		"mysql": func(t *testing.T) (table, func() table) { // a pool of sessions whose clock stands still, an hour ago
			d := fresh(t, testdb.MySQL(t))
			return d.table(t), func() table { return d.with(fmt.Sprint("timestamp=", time.Now().Add(-time.Hour).Unix())).table(t) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			tb, setBack := start(t)
			last := acquire(t, tb, "r")
			other := acquire(t, tb, "other")
			require.NoError(t, tb.Release(t.Context(), last))
			require.NoError(t, tb.Release(t.Context(), other))

			tb = setBack()
			for range 20 {
				rec := acquire(t, tb, "r")
				assert.Greater(t, rec.Token, last.Token)
				assert.WithinDuration(t, time.Now(), rec.ExpiresAt, time.Minute, "an hour from its now, not from the token")
				last = rec
				_, err := tb.Acquire(t.Context(), "r", "another", time.Hour)
				assert.ErrorIs(t, err, locker.ErrHeld)
				renewed, err := tb.Renew(t.Context(), rec, time.Hour)
				require.NoError(t, err)
				assert.Equal(t, rec.Token, renewed.Token)
				require.NoError(t, tb.Release(t.Context(), renewed))
			}
			// The tokens of these rows lie in the future: deleted, the next ones would be lower.
			n, err := tb.Purge(t.Context(), 0)
			require.NoError(t, err)
			assert.Zero(t, n)
			assert.Greater(t, acquire(t, tb, "other").Token, other.Token)
		})
	}
}

func acquire(t *testing.T, l locker.Locker, resource string) locker.Record {
	t.Helper()
	rec, err := l.Acquire(t.Context(), resource, "o", time.Hour)
	require.NoError(t, err)
	return rec
}
