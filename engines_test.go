package locker_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/locker-go/locker"
	"github.com/locker-go/locker/internal/testdb"
	"github.com/locker-go/locker/lockertest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(closing{m}) }

// closing closes what the examples, which have no clean-up, have opened, before leaks are looked for.
type closing struct{ *testing.M }

func (m closing) Run() int {
	code := m.M.Run()
	for _, db := range opened {
		db.Close()
	}
	return code
}

func dialect(e testdb.Engine) locker.Dialect {
	return map[string]func() locker.Dialect{"postgres": locker.Postgres, "mysql": locker.MySQL, "sqlite": locker.SQLite}[e.Name]()
}

// servers is the engines that are servers. The test is skipped where there is none.
func servers(t testing.TB) []testdb.Engine {
	t.Helper()
	all := slices.DeleteFunc(testdb.Engines(t), func(e testdb.Engine) bool { return e.Name == "sqlite" })
	if len(all) == 0 {
		t.Skip("no server here")
	}
	return all
}

// A database is a fresh one of an engine, for pools and Tables as many as a test wants.
type database struct {
	testdb.Engine
	dsn string
}

func fresh(t testing.TB, e testdb.Engine, params ...string) database {
	t.Helper()
	if e.Name == "sqlite" && len(params) == 0 {
		params = []string{"_pragma=busy_timeout(100)"} // see SQLite: a longer one is deaf to ctx
	}
	return database{e, e.DSN(t, params...)}
}

// with is the same database, opened with more parameters.
func (d database) with(params ...string) database {
	for _, p := range params {
		name, value, _ := strings.Cut(p, "=")
		sep := "?"
		if strings.Contains(d.dsn, "?") {
			sep = "&"
		}
		d.dsn += sep + name + "=" + strings.ReplaceAll(url.QueryEscape(value), "+", "%20")
	}
	return d
}

func (d database) pool(t testing.TB) *sql.DB {
	t.Helper()
	db := testdb.Open(t, d.Driver, d.dsn)
	db.SetMaxOpenConns(8)
	db.SetMaxIdleConns(8) // database/sql keeps two, and makes the others anew for each call
	return db
}

// table is a Table on a pool of its own that knows its rows too, for what only SQL can do.
type table struct {
	*locker.Table
	db *sql.DB
	e  testdb.Engine
}

func (d database) table(t testing.TB, opts ...locker.Option) table {
	t.Helper()
	db := d.pool(t)
	tb, err := locker.New(db, dialect(d.Engine), opts...)
	require.NoError(t, err)
	require.NoError(t, tb.CreateTable(t.Context()))
	return table{tb, db, d.Engine}
}

// bind is the driver's placeholder for a single parameter.
func bind(e testdb.Engine) string {
	if e.Name == "postgres" {
		return "$1"
	}
	return "?"
}

func (tb table) DeleteRow(ctx context.Context, resource string) error {
	_, err := tb.db.ExecContext(ctx, "DELETE FROM distributed_locks WHERE resource = "+bind(tb.e), resource)
	return err
}

// Block holds the row as a transaction does that reads it and wants it to stay: the hard case, because it changes nothing.
func (tb table) Block(ctx context.Context, resource string) (func(), error) {
	return block(ctx, tb.e, tb.db, "distributed_locks", "resource", resource)
}

func block(ctx context.Context, e testdb.Engine, db *sql.DB, table, key, resource string) (func(), error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	begin, lock := "BEGIN", "SELECT "+key+" FROM "+table+" WHERE "+key+" = "+bind(e)
	switch e.Name {
	case "postgres":
		begin += " ISOLATION LEVEL READ COMMITTED" // whatever the default is, this is not to fail
		lock += " FOR SHARE"
	case "mysql":
		lock += " LOCK IN SHARE MODE"
	case "sqlite":
		begin = "BEGIN IMMEDIATE"
	}
	if _, err := conn.ExecContext(ctx, begin); err != nil {
		conn.Close()
		return nil, err
	}
	var found string
	if err := conn.QueryRowContext(ctx, lock, resource).Scan(&found); err != nil {
		conn.Close()
		return nil, err
	}
	var once sync.Once
	return func() {
		once.Do(func() {
			conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK")
			conn.Close()
		})
	}, nil
}

// run runs the suite on fresh Tables of d.
func (d database) run(t *testing.T) {
	lockertest.Run(t, func(t *testing.T) locker.Locker { return d.table(t) })
}

func TestConformance(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) { fresh(t, e).run(t) })
	}
}

// The settings under which a lock table has failed elsewhere. The whole suite runs on those that differ most; the others are walked
// through, in pairs, by TestEveryDriverSetting.
func TestConformanceUnderHardSettings(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	t.Run("postgres serializable, simple protocol", func(t *testing.T) {
		t.Parallel()
		fresh(t, testdb.Postgres(t), "default_transaction_isolation=serializable", "default_query_exec_mode=simple_protocol", "timezone=Asia/Tokyo").run(t)
	})
	t.Run("mysql, everything else", func(t *testing.T) {
		t.Parallel()
		fresh(t, testdb.MySQL(t), "clientFoundRows=true", "interpolateParams=true", "parseTime=true", "loc=America/New_York",
			"time_zone='+09:00'", "sql_mode='ANSI_QUOTES,SIMULTANEOUS_ASSIGNMENT,NO_BACKSLASH_ESCAPES'", "tx_isolation='SERIALIZABLE'").run(t)
	})
	t.Run("sqlite without a pragma", func(t *testing.T) {
		t.Parallel()
		fresh(t, testdb.SQLitePlain(t)).run(t)
	})
	t.Run("sqlite in memory", func(t *testing.T) {
		t.Parallel()
		db := testdb.Open(t, "sqlite", ":memory:")
		db.SetMaxOpenConns(1)
		tb, err := locker.New(db, locker.SQLite())
		require.NoError(t, err)
		require.NoError(t, tb.CreateTable(t.Context()))
		lockertest.Run(t, func(t *testing.T) locker.Locker { return tb })
	})
}

// settings are the options of the drivers and servers that could bend a time, a count or a name.
var settings = map[string][][]string{
	"postgres": {
		nil,
		{"default_query_exec_mode=simple_protocol"},
		{"default_query_exec_mode=exec"},
		{"default_query_exec_mode=cache_describe"},
		{"default_query_exec_mode=describe_exec"},
		{"default_transaction_isolation=serializable"},
		{"default_transaction_isolation=repeatable read", "timezone=America/New_York"},
		{"timezone=Asia/Tokyo", "datestyle=German", "intervalstyle=sql_standard", "extra_float_digits=-15"},
	},
	"mysql": {
		nil,
		{"parseTime=true"},
		{"parseTime=true", "loc=Asia/Tokyo"},
		{"loc=America/Sao_Paulo", "time_zone='-03:00'"},
		{"time_zone='+09:00'"},
		{"interpolateParams=true", "sql_mode=''"},
		{"clientFoundRows=true"},
		{"clientFoundRows=true", "interpolateParams=true", "parseTime=true", "loc=Asia/Tokyo", "time_zone='+05:30'"},
		{"sql_mode='ANSI_QUOTES'"},
		{"sql_mode='ANSI,NO_BACKSLASH_ESCAPES,TRADITIONAL'", "collation=latin1_swedish_ci"},
		{"sql_mode='SIMULTANEOUS_ASSIGNMENT'"},
		{"tx_isolation='SERIALIZABLE'"},
		{"tx_isolation='READ-COMMITTED'", "innodb_snapshot_isolation=1"},
		{"explicit_defaults_for_timestamp=0", "sql_mode='ORACLE'"},
	},
	"sqlite": {
		nil,
		{"_pragma=synchronous(FULL)", "_txlock=immediate"},
		{"_time_format=sqlite", "_timezone=Asia/Tokyo"},
	},
}

// Two services may open the same table with different settings: each ordered pair of settings excludes and reads right.
func TestEveryDriverSetting(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			d := fresh(t, e)
			tables := make([]table, len(settings[e.Name]))
			for i, params := range settings[e.Name] {
				tables[i] = d.with(params...).table(t)
			}
			for i, a := range tables {
				for j, b := range tables {
					walk(t, a, b, fmt.Sprintf("%v then %v", settings[e.Name][i], settings[e.Name][j]))
				}
			}
		})
	}
}

// walk leads two Tables through all the verbs on one name.
func walk(t *testing.T, a, b table, what string) {
	t.Helper()
	ctx, name := t.Context(), "é😀'`\"\\ "+what
	if len(name) > locker.MaxName {
		name = name[:locker.MaxName-locker.MaxName%4]
	}
	rec, err := a.Acquire(ctx, name, "A😀", time.Minute)
	require.NoError(t, err, what)
	sane := func(rec locker.Record, ttl time.Duration) {
		t.Helper()
		assert.WithinDuration(t, time.Now().Add(ttl), rec.ExpiresAt, 2*time.Second, what)
		assert.WithinDuration(t, time.Now(), rec.AcquiredAt, 10*time.Second, what)
		assert.Equal(t, rec.AcquiredAt.UnixMicro(), rec.Token, what)
	}
	sane(rec, time.Minute)
	_, err = b.Acquire(ctx, name, "B", time.Minute)
	var held *locker.HeldError
	require.ErrorAs(t, err, &held, what)
	assert.Equal(t, rec.Token, held.Holder.Token, what)
	assert.Equal(t, "A😀", held.Holder.Owner, what)
	seen, err := b.Get(ctx, name)
	require.NoError(t, err, what)
	sane(seen, time.Minute)
	for range 2 {
		renewed, err := a.Renew(ctx, rec, time.Hour)
		require.NoError(t, err, what)
		sane(renewed, time.Hour)
		assert.Equal(t, rec.Token, renewed.Token, what)
	}
	_, err = b.Renew(ctx, locker.Record{Resource: name, Owner: "B", Token: rec.Token}, time.Hour)
	assert.ErrorIs(t, err, locker.ErrNotOwner, what)
	batch, err := a.RenewBatch(ctx, []locker.Record{rec, {Resource: name + "x", Owner: "A", Token: 1}}, 2*time.Hour)
	require.NoError(t, err, what)
	require.Len(t, batch, 1, what)
	sane(batch[0], 2*time.Hour)
	given, err := a.Handover(ctx, rec, "C", time.Minute)
	require.NoError(t, err, what)
	sane(given, time.Minute)
	assert.Greater(t, given.Token, rec.Token, what)
	assert.ErrorIs(t, a.Release(ctx, rec), locker.ErrNotOwner, what)
	require.NoError(t, b.Release(ctx, given), what)
	assert.ErrorIs(t, b.Release(ctx, given), locker.ErrNotHeld, what)
	_, err = a.Get(ctx, name)
	assert.ErrorIs(t, err, locker.ErrNotHeld, what)
	again, err := b.Acquire(ctx, name, "B", time.Minute)
	require.NoError(t, err, what)
	assert.Greater(t, again.Token, given.Token, what)
	require.NoError(t, b.Release(ctx, again), what)
	rows, err := b.Purge(ctx, 0)
	require.NoError(t, err, what)
	assert.EqualValues(t, 1, rows, what)
}

// 40001, 40P01, 1213, 1205, 1020 and SQLITE_BUSY are the library's business, not the caller's.
func TestRetryableErrorsNeverReachTheCaller(t *testing.T) {
	for _, c := range []struct {
		name   string
		engine func(testing.TB) testdb.Engine
		params []string
	}{
		{"postgres serializable", testdb.Postgres, []string{"default_transaction_isolation=serializable"}},
		{"postgres repeatable read", testdb.Postgres, []string{"default_transaction_isolation=repeatable read"}},
		{"postgres lock_timeout", testdb.Postgres, []string{"lock_timeout=1ms"}},
		{"mysql", testdb.MySQL, nil},
		{"mysql serializable", testdb.MySQL, []string{"tx_isolation='SERIALIZABLE'"}},
		{"mysql snapshot isolation", testdb.MySQL, []string{"innodb_snapshot_isolation=1"}},
		{"mysql lock wait", testdb.MySQL, []string{"innodb_lock_wait_timeout=0"}},
		{"sqlite plain", testdb.SQLitePlain, nil},
		{"sqlite plain wal", testdb.SQLitePlain, []string{"_pragma=journal_mode(WAL)"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tb := fresh(t, c.engine(t), c.params...).table(t)
			tb.db.SetMaxOpenConns(16)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var granted, inside atomic.Int32
			var all sync.WaitGroup
			for g := range 12 {
				all.Go(func() {
					owner := fmt.Sprint("owner ", g)
					for i := range 40 {
						name := fmt.Sprint("neighbour ", i%3)
						rec, err := tb.Acquire(ctx, name, owner, time.Minute)
						if err != nil {
							if !assert.ErrorIs(t, err, locker.ErrHeld) {
								return
							}
							continue
						}
						granted.Add(1)
						if i%3 == 0 {
							assert.EqualValues(t, 1, inside.Add(1))
						}
						rec, err = tb.Renew(ctx, rec, time.Minute)
						if i%3 == 0 {
							inside.Add(-1)
						}
						if !assert.NoError(t, err) || !assert.NoError(t, tb.Release(ctx, rec)) {
							return
						}
					}
				})
			}
			all.Wait()
			assert.Positive(t, granted.Load())
		})
	}
}
