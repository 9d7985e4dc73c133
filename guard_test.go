package locker_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jmoiron/sqlx"
	"github.com/locker-go/locker"
	"github.com/locker-go/locker/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"modernc.org/sqlite"
)

// A guarded is something with a Guard, an account that it guards, and transactions at one isolation level.
type guarded struct {
	guarder
	d       database
	db      *sql.DB // of those who write; the lock has a pool of its own
	options *sql.TxOptions
	first   bool // a transaction sees the database as it was at its first statement, which is to be Guard
	ttl     time.Duration
}

type guarder interface {
	locker.Locker
	Guard(ctx context.Context, tx locker.Tx, rec locker.Record) error
}

// everyGuard runs test for every engine and isolation level.
func everyGuard(t *testing.T, ttl time.Duration, test func(*testing.T, guarded)) {
	t.Parallel() // most of it is waiting
	const busy = "_pragma=busy_timeout(100)"
	type level struct {
		name   string
		level  sql.IsolationLevel
		first  bool
		params []string
	}
	levels := map[string][]level{
		"postgres": {
			{name: "read committed", level: sql.LevelReadCommitted},
			{name: "repeatable read", level: sql.LevelRepeatableRead, first: true},
			{name: "serializable", level: sql.LevelSerializable, first: true},
		},
		"mysql": {
			{name: "read uncommitted", level: sql.LevelReadUncommitted},
			{name: "read committed", level: sql.LevelReadCommitted},
			{name: "repeatable read", level: sql.LevelRepeatableRead},
			{name: "serializable", level: sql.LevelSerializable},
			{name: "snapshot isolation", level: sql.LevelRepeatableRead, first: true, params: []string{"innodb_snapshot_isolation=1"}},
		},
		"sqlite": {
			{name: "immediate", params: []string{busy, "_txlock=immediate"}},
			{name: "deferred", first: true, params: []string{busy, "_txlock=deferred"}},
			{name: "deferred, rollback journal", first: true, params: []string{busy, "_txlock=deferred", "_pragma=journal_mode(DELETE)"}},
		},
	}
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			t.Parallel()
			for _, l := range levels[e.Name] {
				for _, kind := range []string{"table", "row", "row without owner"} {
					t.Run(l.name+"/"+kind, func(t *testing.T) {
						d := fresh(t, e, l.params...)
						g := guarded{d: d, db: d.pool(t), options: &sql.TxOptions{Isolation: l.level}, first: l.first, ttl: ttl}
						execute(t, g.db, fmt.Sprintf("CREATE TABLE account (id INT PRIMARY KEY, cents BIGINT NOT NULL, locked_at %s NULL, locked_by %s NULL)",
							lockedAtType[e.Name], ownerType[e.Name]))
						execute(t, g.db, "INSERT INTO account (id, cents) VALUES (7, 0), (8, 0)")
						g.guarder = d.guarder(t, kind, ttl)
						test(t, g)
					})
				}
			}
		})
	}
}

func (d database) guarder(t *testing.T, kind string, ttl time.Duration) guarder {
	spec := locker.RowSpec{Table: "account", Key: "id", LockedAt: "locked_at", TTL: ttl}
	switch kind {
	case "table":
		return d.table(t).Table
	case "row":
		spec.Owner = "locked_by"
	}
	r, err := locker.NewRowTable(t.Context(), d.pool(t), dialect(d.Engine), spec)
	require.NoError(t, err)
	return r
}

func (g guarded) begin(t *testing.T) *sql.Tx {
	t.Helper()
	tx, err := g.db.BeginTx(t.Context(), g.options)
	require.NoError(t, err)
	t.Cleanup(func() { tx.Rollback() })
	return tx
}

// write sets the account to cents in a transaction under check, which is Guard, or nothing.
func (g guarded) write(ctx context.Context, cents int64, check func(*sql.Tx) error) error {
	tx, err := g.db.BeginTx(ctx, g.options)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	set := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE account SET cents = %d WHERE id = 7", cents))
		return err
	}
	steps := []func(*sql.Tx) error{set, check}
	if g.first {
		steps = []func(*sql.Tx) error{check, set}
	}
	for _, step := range steps {
		if err := step(tx); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func (g guarded) by(ctx context.Context, rec locker.Record) func(*sql.Tx) error {
	return func(tx *sql.Tx) error { return g.Guard(ctx, tx, rec) }
}

func (g guarded) cents(ctx context.Context) (n int64, err error) {
	return n, g.db.QueryRowContext(ctx, "SELECT cents FROM account WHERE id = 7").Scan(&n)
}

func (g guarded) hasCents(t *testing.T, want int64, what string) {
	t.Helper()
	n, err := g.cents(t.Context())
	require.NoError(t, err)
	assert.Equal(t, want, n, what)
}

// onceMore reports whether err says that the transaction may be sent again.
func (g guarded) onceMore(err error) bool { return dialect(g.d.Engine).Retryable(err) }

// holder is a grant of owner under which cents were written.
func (g guarded) holder(t *testing.T, owner string, cents int64) locker.Record {
	t.Helper()
	for n := 0; ; n++ {
		begin := time.Now()
		rec, err := g.Acquire(t.Context(), "7", fmt.Sprint(owner, n), g.ttl)
		require.NoError(t, err)
		err = g.write(t.Context(), cents, g.by(t.Context(), rec))
		if err == nil {
			return rec
		}
		require.Greater(t, time.Since(begin), g.ttl, "%v", err) // a slow machine
		g.expire(t)
	}
}

func (g guarded) expire(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := g.Get(t.Context(), "7")
		return errors.Is(err, locker.ErrNotHeld)
	}, 30*time.Second, time.Millisecond)
}

func TestGuardRefusesAHolderWhoStalled(t *testing.T) {
	everyGuard(t, 200*time.Millisecond, func(t *testing.T, g guarded) {
		a := g.holder(t, "A", 1)
		g.expire(t)
		err := g.write(t.Context(), 2, g.by(t.Context(), a))
		assert.ErrorIs(t, err, locker.ErrLost, "expired")
		assert.ErrorIs(t, err, locker.ErrNotHeld)
		g.hasCents(t, 1, "nothing was written")

		b := g.holder(t, "B", 3)
		err = g.write(t.Context(), 4, g.by(t.Context(), a))
		var lost *locker.LostError
		require.ErrorAs(t, err, &lost, "B has it, or has had it")
		assert.ErrorIs(t, err, locker.ErrLost)
		assert.Equal(t, a, lost.Lease)
		b.Token++
		assert.ErrorIs(t, g.write(t.Context(), 5, g.by(t.Context(), b)), locker.ErrLost, "a token that was never given out")
		g.hasCents(t, 3, "B's data stand")
	})
}

// A has begun its transaction and read in it before it stalls, and goes on in it when B has written.
func TestGuardRefusesATransactionFromBeforeTheLoss(t *testing.T) {
	everyGuard(t, 200*time.Millisecond, func(t *testing.T, g guarded) {
		if g.d.Name == "sqlite" && !g.first {
			t.Skip("a transaction that began IMMEDIATE is the only one that can write")
		}
		for _, guardFirst := range []bool{false, true} {
			a := g.holder(t, "A", 1)
			tx := g.begin(t)
			_ = number(t, tx, "SELECT cents FROM account WHERE id = 8")
			g.expire(t)
			want := int64(3)
			ctx, cancel := context.WithTimeout(t.Context(), g.ttl)
			_, err := g.Acquire(ctx, "7", "B", g.ttl)
			cancel()
			if err == nil {
				execute(t, g.db, "UPDATE account SET cents = 3 WHERE id = 7")
			} else { // a reader keeps everybody from writing
				require.Contains(t, t.Name(), "rollback_journal")
				require.ErrorIs(t, err, context.DeadlineExceeded)
				want = 1
			}
			err = nil
			if guardFirst {
				err = g.Guard(t.Context(), tx, a)
			}
			if err == nil {
				_, err = tx.ExecContext(t.Context(), "UPDATE account SET cents = 4 WHERE id = 7")
			}
			if err == nil && !guardFirst {
				err = g.Guard(t.Context(), tx, a)
			}
			assert.True(t, errors.Is(err, locker.ErrLost) || g.onceMore(err), "%v", err)
			assert.False(t, errors.Is(err, locker.ErrLost) && g.onceMore(err), "%v", err)
			require.NoError(t, tx.Rollback())
			g.hasCents(t, want, "B's data stand")
			g.expire(t)
		}
	})
}

// A has passed Guard and not committed when its lease ends.
func TestGuardKeepsClaimersOutUntilTheCommit(t *testing.T) {
	everyGuard(t, 200*time.Millisecond, func(t *testing.T, g guarded) {
		for _, end := range []string{"commit", "rollback"} {
			g.holder(t, "before", 1)
			g.expire(t)
			var tx *sql.Tx
			for n := 0; ; n++ {
				a, err := g.Acquire(t.Context(), "7", fmt.Sprint("A", n), g.ttl)
				require.NoError(t, err)
				tx = g.begin(t)
				if err = g.Guard(t.Context(), tx, a); err == nil {
					break
				}
				require.ErrorIs(t, err, locker.ErrLost)
				require.NoError(t, tx.Rollback())
			}
			execute(t, tx, "UPDATE account SET cents = 2 WHERE id = 7")
			g.expire(t) // readers are not kept out

			type answer struct {
				rec locker.Record
				err error
			}
			claimed := make(chan answer, 1)
			go func() {
				rec, err := g.Acquire(t.Context(), "7", "B", g.ttl)
				claimed <- answer{rec, err}
			}()
			if g.d.Name == "sqlite" {
				ctx, cancel := context.WithTimeout(t.Context(), g.ttl)
				_, err := g.Acquire(ctx, "7", "C", g.ttl)
				cancel()
				assert.ErrorIs(t, err, context.DeadlineExceeded)
			} else {
				waiting(t, g.d.Engine, g.db)
			}
			select {
			case b := <-claimed:
				t.Fatalf("claimed under a guarded transaction: %+v", b)
			default:
			}
			want := int64(1)
			if end == "commit" {
				want = 2
				require.NoError(t, tx.Commit())
			} else {
				require.NoError(t, tx.Rollback())
			}
			b := <-claimed
			require.NoError(t, b.err)
			g.hasCents(t, want, end)
			g.expire(t)
		}
	})
}

// Everybody reads the balance under the lock, thinks for a while, often for longer than the lease, and writes one cent more. With
// Guard the balance is the number of commits; without it updates are lost, so the test can fail.
func TestGuardLosesNoUpdate(t *testing.T) {
	everyGuard(t, 2*time.Millisecond, func(t *testing.T, g guarded) {
		if strings.Contains(t.Name(), "rollback_journal") {
			t.Skip("readers and writers keep each other out for longer than the lease")
		}
		rounds := int64(1000)
		switch {
		case strings.Contains(t.Name(), "row"): // much the same statement
			rounds = 200
		case testing.Short():
			rounds = 100
		}
		race := func(rounds int64, check func(context.Context, locker.Record) func(*sql.Tx) error) (commits, refused int64) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			execute(t, g.db, "UPDATE account SET cents = 0")
			var tries, done, lost atomic.Int64
			var all sync.WaitGroup
			for w := range 4 {
				all.Go(func() {
					for n := 0; tries.Load() < rounds || done.Load() == 0; n++ { // on a slow machine more of them
						rec, err := g.Acquire(ctx, "7", fmt.Sprintf("%d %d", w, n), g.ttl)
						if errors.Is(err, locker.ErrHeld) {
							time.Sleep(rand.N(g.ttl / 2))
							continue
						}
						if !assert.NoError(t, err) {
							return
						}
						cents, err := g.cents(ctx)
						if err != nil && !g.onceMore(err) {
							assert.NoError(t, err)
							return
						}
						if err != nil {
							continue
						}
						time.Sleep(rand.N(2 * g.ttl)) // what is tested: it ends before and after the lease
						tries.Add(1)
						err = g.write(ctx, cents+1, check(ctx, rec))
						switch {
						case err == nil:
							done.Add(1)
						case errors.Is(err, locker.ErrLost), g.onceMore(err):
							lost.Add(1)
						default:
							assert.NoError(t, err)
							return
						}
						g.Release(ctx, rec)
					}
				})
			}
			all.Wait()
			return done.Load(), lost.Load()
		}
		commits, refused := race(rounds, g.by)
		g.hasCents(t, commits, "the balance under Guard")
		t.Logf("with Guard: %d commits, %d refused", commits, refused)
		assert.Positive(t, commits)
		assert.Positive(t, refused)

		commits, _ = race(rounds/5, func(context.Context, locker.Record) func(*sql.Tx) error {
			return func(*sql.Tx) error { return nil }
		})
		cents, err := g.cents(t.Context())
		require.NoError(t, err)
		t.Logf("without: %d commits, a balance of %d", commits, cents)
		assert.Less(t, cents, commits, "without Guard updates are lost")
	})
}

func TestGuardNeedsATransaction(t *testing.T) {
	is := func(v any) bool { return reflect.TypeOf(v).Implements(reflect.TypeFor[locker.Tx]()) }
	assert.True(t, is(&sql.Tx{}))
	assert.True(t, is(&sqlx.Tx{}))
	for _, v := range []any{&sql.DB{}, &sqlx.DB{}, &sql.Conn{}, &sqlx.Conn{}} {
		assert.False(t, is(v), "%T", v)
	}
	everyGuard(t, time.Minute, func(t *testing.T, g guarded) {
		rec, err := g.Acquire(t.Context(), "7", "A", g.ttl)
		require.NoError(t, err)
		var none *sql.Tx
		assert.ErrorIs(t, g.Guard(t.Context(), nil, rec), locker.ErrInvalid)
		assert.ErrorIs(t, g.Guard(t.Context(), none, rec), locker.ErrInvalid)
		tx := g.begin(t)
		for _, bad := range []locker.Record{
			{}, {Resource: "7", Owner: "A"}, {Resource: "7", Owner: "A", Token: -1}, {Owner: "A", Token: rec.Token},
		} {
			assert.ErrorIs(t, g.Guard(t.Context(), tx, bad), locker.ErrInvalid, "%+v", bad)
		}
		require.NoError(t, g.Guard(t.Context(), tx, rec), "and the transaction is as it was")
		require.NoError(t, g.Guard(t.Context(), tx, rec), "twice")
		require.NoError(t, tx.Commit())
		assert.ErrorIs(t, g.Guard(t.Context(), tx, rec), sql.ErrTxDone)
		wrapped, err := sqlx.NewDb(g.db, "").BeginTxx(t.Context(), g.options)
		require.NoError(t, err)
		require.NoError(t, g.Guard(t.Context(), wrapped, rec))
		require.NoError(t, wrapped.Commit())
		ctx, cancel := context.WithCancel(t.Context())
		tx = g.begin(t)
		cancel()
		assert.ErrorIs(t, g.Guard(ctx, tx, rec), context.Canceled)
		tx.Rollback()
		require.NoError(t, g.Release(t.Context(), rec), "with the token that it had")
	})
}

// A transaction in another database must never pass.
func TestGuardInAnotherDatabase(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			tb := fresh(t, e).table(t)
			rec, err := tb.Acquire(t.Context(), "7", "A", time.Hour)
			require.NoError(t, err)
			other := fresh(t, e)
			tx := begin(t, other.pool(t))
			err = tb.Guard(t.Context(), tx, rec)
			require.Error(t, err, "no table there")
			assert.NotErrorIs(t, err, locker.ErrLost)
			assert.ErrorContains(t, err, "is the transaction in the database of distributed_locks?")
			tx.Rollback()
			there := other.table(t)
			tx = begin(t, there.db)
			assert.ErrorIs(t, tb.Guard(t.Context(), tx, rec), locker.ErrLost, "no lock there")
			tx.Rollback()
			_, err = there.Acquire(t.Context(), "7", "A", time.Hour)
			require.NoError(t, err)
			tx = begin(t, there.db)
			assert.ErrorIs(t, tb.Guard(t.Context(), tx, rec), locker.ErrLost, "another grant there")
			tx.Rollback()
			for _, foreign := range testdb.Engines(t) {
				if foreign.Name != e.Name {
					tx := begin(t, fresh(t, foreign).table(t).db)
					assert.Error(t, tb.Guard(t.Context(), tx, rec), "a transaction of %s", foreign.Name)
					tx.Rollback()
				}
			}
		})
	}
}

// What a database says of two transactions that collide is for the caller's retry loop, and no word about the lease.
func TestGuardPassesConflictsOn(t *testing.T) {
	everyGuard(t, time.Minute, func(t *testing.T, g guarded) {
		if !g.first {
			t.Skip("transactions do not collide here")
		}
		rec, err := g.Acquire(t.Context(), "7", "A", g.ttl)
		require.NoError(t, err)
		tx := g.begin(t)
		_ = number(t, tx, "SELECT cents FROM account WHERE id = 8") // not as it should be: Guard is to be first
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		renewed, err := g.Renew(ctx, rec, g.ttl)
		if strings.Contains(t.Name(), "rollback_journal") {
			require.ErrorIs(t, err, context.DeadlineExceeded, "the reader keeps the heartbeat out")
			require.NoError(t, g.Guard(t.Context(), tx, rec))
			require.NoError(t, tx.Commit())
			return
		}
		require.NoError(t, err)
		err = g.Guard(t.Context(), tx, renewed)
		assert.NotErrorIs(t, err, locker.ErrLost)
		require.True(t, g.onceMore(err), "%v", err)
		var pg *pgconn.PgError
		var my *mysql.MySQLError
		var lite *sqlite.Error
		switch {
		case errors.As(err, &pg):
			assert.Equal(t, "40001", pg.Code)
		case errors.As(err, &my):
			assert.EqualValues(t, 1020, my.Number)
		case errors.As(err, &lite):
			assert.Equal(t, 517, lite.Code(), "whatever busy_timeout says")
		default:
			t.Errorf("%v", err)
		}
		require.NoError(t, tx.Rollback())
		require.NoError(t, g.write(t.Context(), 1, g.by(t.Context(), renewed)), "once more")
		g.hasCents(t, 1, "")
	})
}

// REPEATABLE READ in MySQL: the transaction sees its old snapshot, Guard must not.
func TestGuardReadsTheNewestRowInMySQL(t *testing.T) {
	tb := fresh(t, testdb.MySQL(t)).table(t)
	a, err := tb.Acquire(t.Context(), "r", "A", time.Minute)
	require.NoError(t, err)
	begun := func() *sql.Tx {
		tx, err := tb.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
		require.NoError(t, err)
		t.Cleanup(func() { tx.Rollback() })
		var owner string
		require.NoError(t, tx.QueryRowContext(t.Context(), "SELECT owner FROM distributed_locks").Scan(&owner))
		require.Equal(t, "A", owner)
		return tx
	}
	renewed, forced, stolen := begun(), begun(), begun()
	_, err = tb.Renew(t.Context(), a, time.Hour)
	require.NoError(t, err)
	require.NoError(t, tb.Guard(t.Context(), renewed, a))
	require.NoError(t, renewed.Rollback())
	_, err = tb.ForceRelease(t.Context(), "r")
	require.NoError(t, err)
	assert.ErrorIs(t, tb.Guard(t.Context(), forced, a), locker.ErrLost)
	require.NoError(t, forced.Rollback())
	_, err = tb.Acquire(t.Context(), "r", "B", time.Minute)
	require.NoError(t, err)
	assert.ErrorIs(t, tb.Guard(t.Context(), stolen, a), locker.ErrLost)
}

// One row that a transaction guards must not hold up the renewal of the others.
func TestAGuardedLeaseDoesNotHoldUpTheOthers(t *testing.T) {
	for _, e := range servers(t) {
		t.Run(e.Name, func(t *testing.T) {
			const ttl, leases = 6 * time.Second, 1000
			d := fresh(t, e)
			tb := d.table(t)
			s := session(t, tb.Table, locker.WithTTL(ttl))
			held := make([]*locker.Lease, leases)
			var all sync.WaitGroup
			for w := range 8 {
				all.Go(func() {
					for i := w; i < leases; i += 8 {
						l, err := s.TryLock(t.Context(), fmt.Sprintf("%04d", i))
						if !assert.NoError(t, err) {
							return
						}
						held[i] = l
					}
				})
			}
			all.Wait()
			if t.Failed() {
				return
			}
			tx := begin(t, d.pool(t))
			require.NoError(t, tb.Guard(t.Context(), tx, held[500].Record()))
			began := time.Now()
			renewed := func(l *locker.Lease) bool { return l.TrustedUntil().After(began.Add(ttl)) }
			others := func() (n int) {
				for i, l := range held {
					if i != 500 && renewed(l) {
						n++
					}
				}
				return n
			}
			// Trusted for longer than a lease of before the guard can be: renewed while it was there, and in time for that of the guarded.
			require.Eventually(t, func() bool { return others() == leases-1 }, time.Until(held[500].TrustedUntil()), 5*time.Millisecond)
			t.Logf("999 leases were renewed %v after the guard", time.Since(began))
			assert.False(t, renewed(held[500]))
			require.NoError(t, tx.Commit())
			require.Eventually(t, func() bool { return renewed(held[500]) }, ttl, 5*time.Millisecond)
			for _, l := range held {
				require.NoError(t, l.Err())
			}
		})
	}
}

// Transactions with several guards, in the order of their names, beside the heartbeat of the same leases.
func TestSeveralGuardsDoNotDeadlock(t *testing.T) {
	deadlocks := map[string]string{
		"postgres": `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`,
		"mysql":    `SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'Innodb_deadlocks'`,
	}
	for _, e := range servers(t) {
		t.Run(e.Name, func(t *testing.T) {
			d := fresh(t, e)
			tb := d.table(t)
			db := d.pool(t)
			before := number(t, db, deadlocks[e.Name])
			s := session(t, tb.Table, locker.WithTTL(2*time.Second))
			var held []*locker.Lease
			for i := range 50 {
				l, err := s.TryLock(t.Context(), fmt.Sprintf("%02d", i))
				require.NoError(t, err)
				held = append(held, l)
			}
			var all sync.WaitGroup
			for w := range 4 {
				all.Go(func() {
					for end := time.Now().Add(3 * time.Second); time.Now().Before(end); { // several beats
						tx, err := db.BeginTx(t.Context(), nil)
						if !assert.NoError(t, err) {
							return
						}
						for i := w; i < len(held); i += 1 + rand.IntN(10) {
							assert.NoError(t, tb.Guard(t.Context(), tx, held[i].Record()))
						}
						assert.NoError(t, tx.Commit())
					}
				})
			}
			all.Wait()
			for _, l := range held {
				assert.NoError(t, l.Err())
			}
			assert.Zero(t, number(t, db, deadlocks[e.Name])-before)
		})
	}
}
