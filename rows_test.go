package locker_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
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
)

// The columns of the rows under test, as a user would declare them.
var (
	lockedAtType = map[string]string{"postgres": "timestamptz", "mysql": "DATETIME(6)", "sqlite": "INTEGER"}
	textKey      = map[string]string{"postgres": `text COLLATE "C"`, "mysql": "VARBINARY(255)", "sqlite": "TEXT NOT NULL"}
	ownerType    = map[string]string{"postgres": `text COLLATE "C"`, "mysql": "VARBINARY(255)", "sqlite": "TEXT"}
)

// rows makes a table of rows that can be locked and returns a RowTable on it.
func (d database) rows(t testing.TB, db *sql.DB, keyType string, spec locker.RowSpec, opts ...locker.Option) *locker.RowTable {
	t.Helper()
	create(t, d, db, keyType, lockedAtType[d.Name])
	r, err := locker.NewRowTable(t.Context(), db, dialect(d.Engine), spec, opts...)
	require.NoError(t, err)
	return r
}

func create(t testing.TB, d database, db *sql.DB, keyType, lockedAt string) {
	t.Helper()
	_, err := db.ExecContext(t.Context(), fmt.Sprintf(`CREATE TABLE IF NOT EXISTS users (id %s PRIMARY KEY, name VARCHAR(40) DEFAULT 'x' NOT NULL,
		cents BIGINT DEFAULT 0 NOT NULL, locked_at %s NULL, locked_by %s NULL)`, keyType, lockedAt, ownerType[d.Name]))
	require.NoError(t, err)
}

func users(owner string, ttl time.Duration) locker.RowSpec {
	return locker.RowSpec{Table: "users", Key: "id", LockedAt: "locked_at", Owner: owner, TTL: ttl}
}

// suiteRows is a RowTable that makes the rows which the suite asks for, and can do with them what only SQL can.
type suiteRows struct {
	*locker.RowTable
	d      database
	db     *sql.DB
	owners *sync.Map // without an owner column: by resource and token
}

type granted struct {
	resource string
	token    int64
}

// named fills in the owner that the database does not know.
func (s *suiteRows) named(ctx context.Context, rec *locker.Record) {
	for begin := time.Now(); rec.Owner == "" && rec.Resource != "" && ctx.Err() == nil && time.Since(begin) < 5*time.Second; {
		if owner, ok := s.owners.Load(granted{rec.Resource, rec.Token}); ok {
			rec.Owner = owner.(string)
		}
		runtime.Gosched() // who has been granted is about to say so
	}
}

func (s *suiteRows) answer(ctx context.Context, rec locker.Record, err error) (locker.Record, error) {
	var held *locker.HeldError
	if errors.As(err, &held) {
		s.named(ctx, &held.Holder)
	}
	if err == nil && rec.Owner != "" {
		s.owners.Store(granted{rec.Resource, rec.Token}, rec.Owner)
	}
	s.named(ctx, &rec)
	return rec, err
}

// made reports whether err says that there was no row, and there is one now.
func (s *suiteRows) made(ctx context.Context, resource string, err error) (bool, error) {
	if !errors.Is(err, locker.ErrNoRow) {
		return false, err
	}
	for {
		_, err := s.db.ExecContext(ctx, map[string]string{
			"postgres": "INSERT INTO users (id) VALUES ($1) ON CONFLICT DO NOTHING",
			"mysql":    "INSERT IGNORE INTO users (id) VALUES (?)",
			"sqlite":   "INSERT OR IGNORE INTO users (id) VALUES (?)",
		}[s.d.Name], resource)
		switch {
		case ctx.Err() != nil:
			return false, ctx.Err()
		case err == nil:
			return true, nil
		case !dialect(s.d.Engine).Retryable(err):
			return false, err
		}
	}
}

func (s *suiteRows) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
	rec, err := s.RowTable.Acquire(ctx, resource, owner, ttl)
	if made, err := s.made(ctx, resource, err); !made {
		return s.answer(ctx, rec, err)
	}
	again, err := s.RowTable.Acquire(ctx, resource, owner, ttl)
	return s.answer(ctx, again, err)
}

func (s *suiteRows) Get(ctx context.Context, resource string) (locker.Record, error) {
	rec, err := s.RowTable.Get(ctx, resource)
	if made, err := s.made(ctx, resource, err); !made {
		return s.answer(ctx, rec, err)
	}
	again, err := s.RowTable.Get(ctx, resource)
	return s.answer(ctx, again, err)
}

func (s *suiteRows) Renew(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
	renewed, err := s.RowTable.Renew(ctx, rec, ttl)
	if made, err := s.made(ctx, rec.Resource, err); !made {
		return s.answer(ctx, renewed, err)
	}
	again, err := s.RowTable.Renew(ctx, rec, ttl)
	return s.answer(ctx, again, err)
}

func (s *suiteRows) Release(ctx context.Context, rec locker.Record) error {
	if made, err := s.made(ctx, rec.Resource, s.RowTable.Release(ctx, rec)); !made {
		return err
	}
	return s.RowTable.Release(ctx, rec)
}

func (s *suiteRows) Handover(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error) {
	given, err := s.RowTable.Handover(ctx, rec, owner, ttl)
	if made, err := s.made(ctx, rec.Resource, err); !made {
		return s.answer(ctx, given, err)
	}
	again, err := s.RowTable.Handover(ctx, rec, owner, ttl)
	return s.answer(ctx, again, err)
}

func (s *suiteRows) RenewBatch(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
	renewed, err := s.RowTable.RenewBatch(ctx, recs, ttl)
	for _, rec := range renewed {
		s.answer(ctx, rec, nil)
	}
	return renewed, err
}

// Expire sets the clock of the lock back by a TTL.
func (s *suiteRows) Expire(ctx context.Context, resource string) error {
	query := map[string]string{
		"postgres": "UPDATE users SET locked_at = locked_at - $2 * interval '1 microsecond' WHERE id = $1",
		"mysql":    "UPDATE users SET locked_at = locked_at - INTERVAL ? MICROSECOND WHERE id = ?",
		"sqlite":   "UPDATE users SET locked_at = locked_at - ? WHERE id = ?",
	}[s.d.Name]
	args := []any{s.TTL().Microseconds(), resource}
	if s.d.Name == "postgres" {
		slices.Reverse(args)
	}
	for {
		_, err := s.db.ExecContext(ctx, query, args...)
		if err == nil || !dialect(s.d.Engine).Retryable(err) {
			return err
		}
	}
}

func (s *suiteRows) Block(ctx context.Context, resource string) (func(), error) {
	return block(ctx, s.d.Engine, s.db, "users", "id", resource)
}

// The fixed TTL takes two runs: one in which no lease ends by itself, one in which they do all the time.
func TestRowTableConformance(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		for _, owner := range []string{"locked_by", ""} {
			opts := []lockertest.Option{lockertest.MovingToken()}
			if owner == "" {
				opts = append(opts, withoutOwner()...)
			}
			for _, ttl := range []time.Duration{10 * time.Minute, 50 * time.Millisecond} {
				t.Run(fmt.Sprintf("%s/owner %q/%v", e.Name, owner, ttl), func(t *testing.T) {
					t.Parallel() // much of it is waiting
					d := fresh(t, e)
					owners := &sync.Map{}
					lockertest.Run(t, func(t *testing.T) locker.Locker {
						db := d.pool(t)
						return &suiteRows{RowTable: d.rows(t, db, textKey[e.Name], users(owner, ttl)), d: d, db: db, owners: owners}
					}, append(opts, lockertest.FixedTTL(ttl))...)
				})
			}
		}
	}
}

// withoutOwner is what a RowTable without an owner column cannot do, as its documentation says.
func withoutOwner() (opts []lockertest.Option) {
	for reason, cases := range map[string][]string{
		"its own holder is refused as well": {"acquire-again", "release-not-owner", "renew-not-owner", "handover-refused", "record-times",
			"record-remaining", "tokens-rise", "batch-duplicates"},
		"a wrong owner with the right token is not noticed":               {"acquire-held", "errors", "names-owner", "batch-left-out"},
		"a record from before a renewal names nothing":                    {"renew-same-instant", "renew-or-release"},
		"nobody knows whose grant it is when the answer was lost":         {"context-tight", "blocked-context"},
		"an empty owner, which is what Get says, is accepted in a record": {"names-rejected", "batch-rejected"},
	} {
		for _, name := range cases {
			opts = append(opts, lockertest.Except(name, reason))
		}
	}
	return opts
}

// rowTable makes a table of users with a lock on each row, in a database of its own.
func rowTable(t *testing.T, e testdb.Engine, owner string, ttl time.Duration) (*locker.RowTable, database, *sql.DB) {
	t.Helper()
	d := fresh(t, e)
	db := d.pool(t)
	r := d.rows(t, db, "BIGINT", users(owner, ttl))
	execute(t, db, "INSERT INTO users (id, name) VALUES (7, 'seven'), (8, 'eight')")
	return r, d, db
}

// everyRow runs test on each engine, with an owner column and without.
func everyRow(t *testing.T, ttl time.Duration, test func(*testing.T, *locker.RowTable, database, *sql.DB)) {
	for _, e := range testdb.Engines(t) {
		for _, owner := range []string{"locked_by", ""} {
			t.Run(fmt.Sprintf("%s/owner %q", e.Name, owner), func(t *testing.T) {
				r, d, db := rowTable(t, e, owner, ttl)
				test(t, r, d, db)
			})
		}
	}
}

func TestRowTableVerbs(t *testing.T) {
	everyRow(t, time.Minute, func(t *testing.T, r *locker.RowTable, d database, db *sql.DB) {
		ctx, ttl := t.Context(), r.TTL()
		assert.Equal(t, time.Minute, ttl)
		owned := strings.Contains(t.Name(), "locked_by")
		others := func() string {
			var all []string
			rows, err := db.QueryContext(ctx, "SELECT id, name, cents FROM users ORDER BY id")
			require.NoError(t, err)
			defer rows.Close()
			for rows.Next() {
				var id, cents int64
				var name string
				require.NoError(t, rows.Scan(&id, &name, &cents))
				all = append(all, fmt.Sprint(id, name, cents))
			}
			return fmt.Sprint(all)
		}
		before := others()

		_, err := r.Get(ctx, "7")
		assert.ErrorIs(t, err, locker.ErrNotHeld)
		a, err := r.Acquire(ctx, "7", "A", ttl)
		require.NoError(t, err)
		assert.Equal(t, "A", a.Owner)
		assert.Equal(t, a.AcquiredAt.UnixMicro(), a.Token)
		assert.Equal(t, ttl, a.ExpiresAt.Sub(a.AcquiredAt))
		_, err = r.Acquire(ctx, "7", "B", ttl)
		var held *locker.HeldError
		require.ErrorAs(t, err, &held)
		assert.Equal(t, a.Token, held.Holder.Token)
		if owned {
			assert.Equal(t, "A", held.Holder.Owner)
		} else {
			assert.Empty(t, held.Holder.Owner)
			assert.NotContains(t, err.Error(), `""`)
			_, err = r.Acquire(ctx, "7", "A", ttl)
			assert.ErrorIs(t, err, locker.ErrHeld, "its own holder as well")
			for _, err := range []error{r.Release(ctx, locker.Record{Resource: "7", Owner: "A"}), r.Finish(ctx, locker.Record{Resource: "7", Owner: "A"}, "cents = 1")} {
				assert.ErrorIs(t, err, locker.ErrInvalid, "token 0")
			}
		}
		seen, err := r.Get(ctx, "7")
		require.NoError(t, err)
		assert.Equal(t, a.Token, seen.Token)
		for _, ttl := range []time.Duration{ttl - time.Second, ttl + time.Second, 0} {
			_, err := r.Acquire(ctx, "8", "A", ttl)
			assert.ErrorIs(t, err, locker.ErrInvalid, ttl)
			_, err = r.Renew(ctx, a, ttl)
			assert.ErrorIs(t, err, locker.ErrInvalid, ttl)
			_, err = r.RenewBatch(ctx, []locker.Record{a}, ttl)
			assert.ErrorIs(t, err, locker.ErrInvalid, ttl)
			_, err = r.Handover(ctx, a, "B", ttl)
			assert.ErrorIs(t, err, locker.ErrInvalid, ttl)
		}
		renewed, err := r.Renew(ctx, a, ttl)
		require.NoError(t, err)
		assert.Greater(t, renewed.Token, a.Token)
		if !owned {
			_, err = r.Renew(ctx, a, ttl)
			assert.ErrorIs(t, err, locker.ErrNotOwner, "the old token is dead")
			assert.ErrorIs(t, r.Release(ctx, a), locker.ErrNotOwner)
		}
		batch, err := r.RenewBatch(ctx, []locker.Record{renewed, {Resource: "8", Owner: "A", Token: 1}, {Resource: "99", Owner: "A", Token: 1}}, ttl)
		require.NoError(t, err)
		require.Len(t, batch, 1)
		assert.Equal(t, "A", batch[0].Owner)
		assert.Greater(t, batch[0].Token, renewed.Token)
		given, err := r.Handover(ctx, batch[0], "B", ttl)
		require.NoError(t, err)
		assert.Equal(t, "B", given.Owner)
		assert.ErrorIs(t, r.Release(ctx, batch[0]), locker.ErrNotOwner)
		require.NoError(t, r.Release(ctx, given))
		assert.ErrorIs(t, r.Release(ctx, given), locker.ErrNotHeld)
		assert.Zero(t, number(t, db, "SELECT count(locked_at) + count(locked_by) FROM users"), "a free row has NULL")
		_, err = r.Renew(ctx, given, ttl)
		assert.ErrorIs(t, err, locker.ErrNotHeld)
		assert.NoError(t, r.Ping(ctx))
		assert.Equal(t, before, others(), "no other column, no other row")
	})
}

// A row that is not there is no lock that is held, and waiting does not help.
func TestRowTableWithoutARow(t *testing.T) {
	everyRow(t, time.Minute, func(t *testing.T, r *locker.RowTable, d database, db *sql.DB) {
		ctx, rec := t.Context(), locker.Record{Resource: "99", Owner: "A", Token: 1}
		_, err := r.Get(ctx, "99")
		assert.ErrorIs(t, err, locker.ErrNoRow)
		assert.ErrorContains(t, err, `"99"`)
		_, err = r.Acquire(ctx, "99", "A", r.TTL())
		assert.ErrorIs(t, err, locker.ErrNoRow)
		assert.NotErrorIs(t, err, locker.ErrHeld)
		_, err = r.Renew(ctx, rec, r.TTL())
		assert.ErrorIs(t, err, locker.ErrNoRow)
		_, err = r.Handover(ctx, rec, "B", r.TTL())
		assert.ErrorIs(t, err, locker.ErrNoRow)
		assert.ErrorIs(t, r.Release(ctx, rec), locker.ErrNoRow)
		assert.ErrorIs(t, r.Finish(ctx, rec, "cents = 1"), locker.ErrNoRow)
		tx := begin(t, db)
		err = r.Guard(ctx, tx, rec)
		assert.ErrorIs(t, err, locker.ErrLost)
		assert.ErrorIs(t, err, locker.ErrNoRow)
		tx.Rollback()
		assert.EqualValues(t, 2, number(t, db, "SELECT count(*) FROM users"), "no row was made")

		s := session(t, r)
		_, err = s.Lock(ctx, "99") // does not wait
		assert.ErrorIs(t, err, locker.ErrNoRow)
		l := lock(t, s, "7")
		execute(t, db, "DELETE FROM users WHERE id = 7")
		err = l.Release(ctx)
		assert.ErrorIs(t, err, locker.ErrLost)
		assert.ErrorIs(t, err, locker.ErrNoRow)
	})
}

// Rows are found by their key and by nothing that is nearly the key.
func TestRowTableKeys(t *testing.T) {
	const free, noRow = "free", "no row"
	big := map[string]string{
		"9007199254740992": free, "9007199254740993": free, "9223372036854775807": free, "-9223372036854775808": free, "0": free, "7": free, "-7": free, "8": noRow,
		" 7": "", "7 ": "", "07": "", " 07": "", "7abc": "", "7.0": "", "+7": "", "-0": "", "7e0": "", "0x7": "", "9007199254740993.0": "", "٧": "", "": "",
		"9223372036854775808": "", "99999999999999999999": "", "7\n": "", "NULL": "", "7 OR 1=1": "", "''": "",
	}
	unsigned := map[string]string{"18446744073709551615": free, "18446744073709551614": free, "7": free, "9007199254740993": free, "-7": "", "07": "", "18446744073709551616": ""}
	id := "0b5f9c1e-8a7d-4c57-9d1f-3a2b1c0d9e8f"
	uuid := map[string]string{id: free, "1" + id[1:]: noRow}
	uuidOnly := map[string]string{id: free, "1" + id[1:]: noRow, strings.ToUpper(id): "", "{" + id + "}": "", strings.ReplaceAll(id, "-", ""): "", " " + id: "", "7": ""}
	text := map[string]string{"a": free, "A": free, "á": free, "7": free, "07": free, "ß": free, "ss": free, "a'b\"c`d": free, "%": free, "🔒": free, "a ": noRow, "a\t": noRow, "_": noRow, "a'": noRow}
	for _, c := range []struct {
		engine, key string
		names       map[string]string
	}{
		{"postgres", "bigint", big}, {"postgres", "int", map[string]string{"7": free, "-7": free, "9007199254740993": noRow, "07": ""}}, {"postgres", "smallint", map[string]string{"7": free, "70000": noRow}},
		{"postgres", "uuid", uuidOnly}, {"postgres", "text", text}, {"postgres", "varchar(255)", text},
		{"mysql", "BIGINT", big}, {"mysql", "BIGINT UNSIGNED", unsigned}, {"mysql", "INT", map[string]string{"7": free, "-7": free, "9007199254740993": noRow, "07": ""}},
		{"mysql", "CHAR(36) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", uuid}, {"mysql", "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", text}, {"mysql", "VARBINARY(255)", text},
		{"mysql", "UUID", uuidOnly},
		{"sqlite", "INTEGER", big}, {"sqlite", "BIGINT", big}, {"sqlite", "TEXT", text}, {"sqlite", "VARCHAR(36)", uuid},
	} {
		t.Run(c.engine+"/"+c.key, func(t *testing.T) {
			d := fresh(t, engine(t, c.engine))
			db := d.pool(t)
			r := d.rows(t, db, c.key, users("locked_by", time.Minute))
			for name, want := range c.names {
				if want == free {
					execute(t, db, "INSERT INTO users (id) VALUES ("+bind(d.Engine)+")", name)
				}
			}
			var held []locker.Record
			for name, want := range c.names {
				rec, err := r.Acquire(t.Context(), name, "owner of "+name, r.TTL())
				switch want {
				case free:
					require.NoError(t, err, "%q", name) // whatever else is held
					held = append(held, rec)
				case noRow:
					assert.ErrorIs(t, err, locker.ErrNoRow, "%q", name)
				default:
					assert.ErrorIs(t, err, locker.ErrInvalid, "%q", name)
					_, err = r.Get(t.Context(), name)
					assert.ErrorIs(t, err, locker.ErrInvalid, "%q", name)
				}
			}
			renewed, err := r.RenewBatch(t.Context(), held, r.TTL())
			require.NoError(t, err)
			require.Len(t, renewed, len(held))
			for _, rec := range renewed {
				seen, err := r.Get(t.Context(), rec.Resource)
				require.NoError(t, err)
				assert.Equal(t, rec.Resource, seen.Resource)
				assert.Equal(t, "owner of "+rec.Resource, seen.Owner)
				assert.Equal(t, rec.Token, seen.Token)
				require.NoError(t, r.Release(t.Context(), rec))
			}
		})
	}
}

func engine(t *testing.T, name string) testdb.Engine {
	return map[string]func(testing.TB) testdb.Engine{"postgres": testdb.Postgres, "mysql": testdb.MySQL, "sqlite": testdb.SQLite}[name](t)
}

// Names that need quotes, with everything that means something to SQL, to sqlx or to a driver.
func TestRowTableHostileNames(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			d := fresh(t, e)
			db := d.pool(t)
			q := func(name string) string { return dialect(e).Quote(name) }
			schema := "odd ?:. schema"
			switch e.Name {
			case "sqlite":
				db.SetMaxOpenConns(1)
				execute(t, db, "ATTACH ':memory:' AS "+q(schema))
			default:
				execute(t, db, "CREATE SCHEMA "+q(schema))
				t.Cleanup(func() { // the server is that of all tests
					cascade := map[string]string{"postgres": " CASCADE"}[e.Name]
					_, err := db.Exec("DROP SCHEMA " + q(schema) + cascade)
					assert.NoError(t, err)
				})
			}
			const table, key, at, by = `order"; DROP TABLE users; --`, "key ?::name", "locked`at':resource", "OWNER$1\\"
			quoted := q(schema) + "." + q(table)
			execute(t, db, fmt.Sprintf("CREATE TABLE %s (%s BIGINT PRIMARY KEY, %s %s NULL, %s %s NULL, k INT, o INT, at INT, l INT, resource INT, owner INT, token INT, value INT)",
				quoted, q(key), q(at), lockedAtType[e.Name], q(by), ownerType[e.Name]))
			execute(t, db, "INSERT INTO "+quoted+" ("+q(key)+") VALUES (7), (8)")
			for _, owner := range []string{by, ""} {
				r, err := locker.NewRowTable(t.Context(), db, dialect(e), locker.RowSpec{
					Table: `"` + schema + `"."` + strings.ReplaceAll(table, `"`, `""`) + `"`, Key: key, LockedAt: at, Owner: owner, TTL: time.Minute,
				})
				require.NoError(t, err)
				rec, err := r.Acquire(t.Context(), "7", "A", r.TTL())
				require.NoError(t, err)
				_, err = r.Acquire(t.Context(), "7", "B", r.TTL())
				require.ErrorIs(t, err, locker.ErrHeld)
				rec, err = r.Renew(t.Context(), rec, r.TTL())
				require.NoError(t, err)
				recs, err := r.RenewBatch(t.Context(), []locker.Record{rec}, r.TTL())
				require.NoError(t, err)
				require.Len(t, recs, 1)
				tx := begin(t, db)
				require.NoError(t, r.Guard(t.Context(), tx, recs[0]))
				require.NoError(t, tx.Commit())
				rec, err = r.Handover(t.Context(), recs[0], "B", r.TTL())
				require.NoError(t, err)
				require.NoError(t, r.Finish(t.Context(), rec, "o = ?, k = k + 1, value = 1 -- done", 5))
				rec, err = r.Acquire(t.Context(), "7", "A", r.TTL())
				require.NoError(t, err)
				require.NoError(t, r.Release(t.Context(), rec))
				assert.EqualValues(t, 5, number(t, db, "SELECT sum(o) FROM "+quoted))
			}
		})
	}
}

// Columns that hold a lock to the microsecond, whatever the zone of the session; and those that are refused, with what to alter.
func TestRowTableColumns(t *testing.T) {
	for _, c := range []struct {
		engine, key, at, by string
		wrong               string // in the message
	}{
		{"postgres", "bigint PRIMARY KEY", "timestamptz", "text", ""},
		{"postgres", "bigint PRIMARY KEY", "timestamp", "text", ""},
		{"postgres", "bigint PRIMARY KEY", "timestamptz(6)", "varchar(255)", ""},
		{"postgres", "bigint PRIMARY KEY", "timestamp(6)", "varchar", ""},
		{"postgres", "bigint UNIQUE", "timestamptz", "text", ""},
		{"postgres", "bigint PRIMARY KEY", "timestamptz(3)", "text", "timestamp(3) with time zone, which does not hold microseconds; ALTER TABLE"},
		{"postgres", "bigint PRIMARY KEY", "timestamp(0)", "text", "ALTER COLUMN locked_at TYPE timestamptz"},
		{"postgres", "bigint PRIMARY KEY", "date", "text", "TYPE timestamptz"},
		{"postgres", "bigint PRIMARY KEY", "bigint", "text", "TYPE timestamptz"},
		{"postgres", "bigint PRIMARY KEY", "text", "text", "TYPE timestamptz"},
		{"postgres", "bigint PRIMARY KEY", "timestamptz NOT NULL", "text", "DROP NOT NULL"},
		{"postgres", "bigint PRIMARY KEY", "timestamptz", "text NOT NULL", "DROP NOT NULL"},
		{"postgres", "bigint PRIMARY KEY", "timestamptz", "varchar(50)", "TYPE text"},
		{"postgres", "bigint", "timestamptz", "text", "ADD UNIQUE"},
		{"postgres", "numeric PRIMARY KEY", "timestamptz", "text", "is numeric"},
		{"postgres", "double precision PRIMARY KEY", "timestamptz", "text", "is float8"},
		{"postgres", "char(36) PRIMARY KEY", "timestamptz", "text", "is bpchar"},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME(6)", "VARBINARY(255)", ""},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME(6)", "VARCHAR(255) CHARACTER SET utf8mb4", ""},
		{"mysql", "BIGINT UNIQUE", "DATETIME(6)", "VARBINARY(255)", ""},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME", "VARBINARY(255)", "ALTER TABLE users MODIFY locked_at DATETIME(6) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME(3)", "VARBINARY(255)", "MODIFY locked_at DATETIME(6) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "TIMESTAMP NULL", "VARBINARY(255)", "DATETIME(6) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "TIMESTAMP(3) NULL", "VARBINARY(255)", "DATETIME(6) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "TIMESTAMP(6) NULL", "VARBINARY(255)", "DATETIME(6) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME(6) NULL ON UPDATE CURRENT_TIMESTAMP(6)", "VARBINARY(255)", "DATETIME(6) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME(6) NOT NULL", "VARBINARY(255)", "DATETIME(6) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "BIGINT", "VARBINARY(255)", "DATETIME(6) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME(6)", "VARCHAR(50) CHARACTER SET utf8mb4", "VARBINARY(255) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME(6)", "VARCHAR(255) CHARACTER SET latin1", "VARBINARY(255) NULL"},
		{"mysql", "BIGINT PRIMARY KEY", "DATETIME(6)", "VARBINARY(255) NOT NULL", "VARBINARY(255) NULL"},
		{"mysql", "BIGINT", "DATETIME(6)", "VARBINARY(255)", "ADD UNIQUE (id)"},
		{"mysql", "DECIMAL(20) PRIMARY KEY", "DATETIME(6)", "VARBINARY(255)", "is DECIMAL"},
		{"mysql", "DOUBLE PRIMARY KEY", "DATETIME(6)", "VARBINARY(255)", "is DOUBLE"},
		{"mysql", "VARCHAR(36) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci PRIMARY KEY", "DATETIME(6)", "VARBINARY(255)", "COLLATE utf8mb4_bin"},
		{"mysql", "VARCHAR(36) CHARACTER SET latin1 COLLATE latin1_bin PRIMARY KEY", "DATETIME(6)", "VARBINARY(255)", "COLLATE utf8mb4_bin"},
		{"sqlite", "INTEGER PRIMARY KEY", "INTEGER", "TEXT", ""},
		{"sqlite", "INTEGER PRIMARY KEY", "BIGINT", "VARCHAR(255)", ""},
		{"sqlite", "INTEGER PRIMARY KEY", "TEXT", "TEXT", ""},
		{"sqlite", "INTEGER PRIMARY KEY", "DATETIME", "TEXT", ""},
		{"sqlite", "INTEGER PRIMARY KEY", "TIMESTAMP", "TEXT", ""},
		{"sqlite", "BIGINT UNIQUE", "INTEGER", "TEXT", ""},
		{"sqlite", "TEXT PRIMARY KEY", "INTEGER", "TEXT", ""},
		{"sqlite", "INTEGER PRIMARY KEY", "REAL", "TEXT", "INTEGER (microseconds since 1970) or TEXT"},
		{"sqlite", "INTEGER PRIMARY KEY", "BLOB", "TEXT", "INTEGER (microseconds since 1970) or TEXT"},
		{"sqlite", "INTEGER PRIMARY KEY", "NUMERIC", "TEXT", "INTEGER (microseconds since 1970) or TEXT"},
		{"sqlite", "INTEGER PRIMARY KEY", "", "TEXT", "INTEGER (microseconds since 1970) or TEXT"},
		{"sqlite", "INTEGER PRIMARY KEY", "INTEGER NOT NULL", "TEXT", "NOT NULL"},
		{"sqlite", "INTEGER", "INTEGER", "TEXT", "CREATE UNIQUE INDEX"},
		{"sqlite", "REAL PRIMARY KEY", "INTEGER", "TEXT", `is "REAL"`},
		{"sqlite", "TEXT COLLATE NOCASE PRIMARY KEY", "INTEGER", "TEXT", "COLLATE NOCASE"},
		{"sqlite", "INTEGER PRIMARY KEY", "INTEGER", "TEXT COLLATE NOCASE", ""},
	} {
		t.Run(strings.Join([]string{c.engine, c.key, c.at, c.by}, "/"), func(t *testing.T) {
			d := fresh(t, engine(t, c.engine))
			db := d.pool(t)
			execute(t, db, fmt.Sprintf("CREATE TABLE users (id %s, locked_at %s, locked_by %s)", c.key, c.at, c.by))
			spec := users("locked_by", time.Minute)
			_, err := locker.NewRowTable(t.Context(), db, dialect(d.Engine), spec)
			if c.wrong != "" {
				require.ErrorIs(t, err, locker.ErrInvalid)
				assert.ErrorContains(t, err, c.wrong)
				t.Log(err)
				return
			}
			require.NoError(t, err)
			execute(t, db, "INSERT INTO users (id) VALUES (7)")
			var tables []*locker.RowTable
			for _, params := range settings[c.engine] {
				r, err := locker.NewRowTable(t.Context(), d.with(params...).pool(t), dialect(d.Engine), spec)
				require.NoError(t, err, params)
				tables = append(tables, r)
			}
			for i, a := range tables {
				b := tables[(i+1)%len(tables)]
				what := fmt.Sprintf("%v then %v", settings[c.engine][i], settings[c.engine][(i+1)%len(tables)])
				sane := func(rec locker.Record) {
					t.Helper()
					assert.WithinDuration(t, time.Now().Add(time.Minute), rec.ExpiresAt, 2*time.Second, what)
					assert.Equal(t, rec.AcquiredAt.UnixMicro(), rec.Token, what)
				}
				rec, err := a.Acquire(t.Context(), "7", "A😀é", time.Minute)
				require.NoError(t, err, what)
				sane(rec)
				var held *locker.HeldError
				_, err = b.Acquire(t.Context(), "7", "B", time.Minute)
				require.ErrorAs(t, err, &held, what)
				assert.Equal(t, rec.Token, held.Holder.Token, what)
				assert.Equal(t, "A😀é", held.Holder.Owner, what)
				_, err = b.Acquire(t.Context(), "7", "a😀é", time.Minute)
				require.ErrorIs(t, err, locker.ErrHeld, "another owner: %s", what)
				assert.WithinDuration(t, rec.ExpiresAt, held.Holder.ExpiresAt, 0, what)
				batch, err := b.RenewBatch(t.Context(), []locker.Record{rec}, time.Minute)
				require.NoError(t, err, what)
				require.Len(t, batch, 1, what)
				sane(batch[0])
				given, err := a.Handover(t.Context(), batch[0], "C", time.Minute)
				require.NoError(t, err, what)
				sane(given)
				renewed, err := b.Renew(t.Context(), given, time.Minute)
				require.NoError(t, err, what)
				sane(renewed)
				seen, err := a.Get(t.Context(), "7")
				require.NoError(t, err, what)
				assert.Equal(t, renewed.Token, seen.Token, what)
				require.NoError(t, a.Release(t.Context(), renewed), what)
			}
		})
	}
}

// What people write into the column by hand, or by another program.
func TestRowTableForeignTimes(t *testing.T) {
	const free, held = "free", "held"
	for _, c := range []struct{ engine, at, value, want string }{
		{"postgres", "timestamptz", "NULL", free}, {"postgres", "timestamptz", "'-infinity'", free}, {"postgres", "timestamptz", "'0044-03-15 BC'", free},
		{"postgres", "timestamptz", "'1970-01-01Z'", free}, {"postgres", "timestamptz", "now() - interval '2 minutes'", free}, {"postgres", "timestamptz", "now()", held},
		{"postgres", "timestamptz", "now() + interval '1 year'", held}, {"postgres", "timestamptz", "'infinity'", held}, {"postgres", "timestamptz", "'99999-01-01'", held},
		{"postgres", "timestamp", "'-infinity'", free}, {"postgres", "timestamp", "'infinity'", held}, {"postgres", "timestamp", "now() AT TIME ZONE 'UTC'", held},
		{"mysql", "DATETIME(6)", "NULL", free}, {"mysql", "DATETIME(6)", "'0000-00-00'", free}, {"mysql", "DATETIME(6)", "'1000-01-01'", free}, {"mysql", "DATETIME(6)", "'2024-02-00'", free},
		{"mysql", "DATETIME(6)", "UTC_TIMESTAMP() - INTERVAL 2 MINUTE", free}, {"mysql", "DATETIME(6)", "UTC_TIMESTAMP(6)", held}, {"mysql", "DATETIME(6)", "'9999-12-31 23:59:59.999999'", held},
		{"sqlite", "INTEGER", "NULL", free}, {"sqlite", "INTEGER", "0", free}, {"sqlite", "INTEGER", "-5", free}, {"sqlite", "INTEGER", "strftime('%s', 'now') * 1000000", held},
		{"sqlite", "INTEGER", "9223372036854775807", held}, {"sqlite", "INTEGER", "'never'", held}, {"sqlite", "INTEGER", "1e300", held}, {"sqlite", "INTEGER", "x'00'", held},
		{"sqlite", "TEXT", "NULL", free}, {"sqlite", "TEXT", "'0000-00-00 00:00:00'", free}, {"sqlite", "TEXT", "'1969-01-01'", free}, {"sqlite", "TEXT", "'2024-01-01T00:00:00Z'", free},
		{"sqlite", "TEXT", "datetime('now', '-2 minutes')", free}, {"sqlite", "TEXT", "CURRENT_TIMESTAMP", held}, {"sqlite", "TEXT", "'9999-12-31 23:59:59.999999'", held},
		{"sqlite", "TEXT", "'never'", held}, {"sqlite", "TEXT", "''", held}, {"sqlite", "TEXT", "'2024-13-45'", held}, {"sqlite", "TEXT", "x'00'", held},
	} {
		t.Run(strings.Join([]string{c.engine, c.at, c.value}, "/"), func(t *testing.T) {
			d := fresh(t, engine(t, c.engine))
			if c.engine == "mysql" {
				d = d.with("sql_mode=''") // so that zero dates can be written
			}
			db := d.pool(t)
			create(t, d, db, "BIGINT", c.at)
			execute(t, db, "INSERT INTO users (id, locked_at) VALUES (7, "+c.value+")")
			for _, owner := range []string{"locked_by", ""} {
				r, err := locker.NewRowTable(t.Context(), d.pool(t), dialect(d.Engine), users(owner, time.Minute))
				require.NoError(t, err)
				seen, err := r.Get(t.Context(), "7")
				if c.want == held {
					require.NoError(t, err)
					assert.Positive(t, seen.Remaining)
					_, err = r.Acquire(t.Context(), "7", "A", r.TTL())
					require.ErrorIs(t, err, locker.ErrHeld)
					continue
				}
				require.ErrorIs(t, err, locker.ErrNotHeld)
				rec, err := r.Acquire(t.Context(), "7", "A", r.TTL())
				require.NoError(t, err)
				assert.WithinDuration(t, time.Now(), rec.AcquiredAt, 2*time.Second)
				require.NoError(t, r.Release(t.Context(), rec))
				execute(t, db, "UPDATE users SET locked_at = "+c.value)
			}
		})
	}
}

func TestSessionOnRowTable(t *testing.T) {
	everyRow(t, 1500*time.Millisecond, func(t *testing.T, r *locker.RowTable, d database, db *sql.DB) {
		const leases = 30
		ctx := t.Context()
		for i := range leases {
			execute(t, db, fmt.Sprintf("INSERT INTO users (id) VALUES (%d)", 100+i))
		}
		s := session(t, r) // with the TTL of the RowTable
		_, err := s.TryLock(ctx, "7", locker.WithTTL(time.Minute))
		assert.ErrorIs(t, err, locker.ErrInvalid)
		_, err = s.TryLock(ctx, "7", locker.WithMinHold(time.Minute))
		assert.ErrorIs(t, err, locker.ErrInvalid)
		_, err = locker.NewSession(r, locker.WithTTL(time.Minute))
		assert.ErrorIs(t, err, locker.ErrInvalid)
		_, err = locker.NewSession(r, locker.WithMinHold(time.Minute))
		assert.ErrorIs(t, err, locker.ErrInvalid)
		_, err = s.Lock(ctx, "07")
		assert.ErrorIs(t, err, locker.ErrInvalid, "at once")

		var held []*locker.Lease
		for i := range leases {
			held = append(held, lock(t, s, fmt.Sprint(100+i)))
		}
		began := time.Now()
		first := held[0].Token()
		require.Eventually(t, func() bool { return time.Since(began) > 2*r.TTL() }, time.Minute, 10*time.Millisecond)
		for _, l := range held {
			require.NoError(t, l.Err(), "renewed together")
			require.Eventually(t, func() bool { // but for a renewal that comes between
				rec, err := r.Get(ctx, l.Record().Resource)
				return err == nil && rec.Token == l.Token()
			}, time.Minute, time.Millisecond)
		}
		assert.Greater(t, held[0].Token(), first)
		require.NoError(t, held[0].Release(ctx))
		_, err = r.Get(ctx, "100")
		assert.ErrorIs(t, err, locker.ErrNotHeld)

		// In line: one after the other, in this process and in another.
		other := session(t, r)
		inside, most, n := atomic.Int32{}, atomic.Int32{}, 0
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				err := []*locker.Session{s, other}[i%2].Do(ctx, "7", func(context.Context, *locker.Lease) error {
					most.Store(max(most.Load(), inside.Add(1)))
					n++
					inside.Add(-1)
					return nil
				})
				assert.NoError(t, err)
			})
		}
		all.Wait()
		assert.EqualValues(t, 1, most.Load())
		assert.Equal(t, 8, n)

		// Forced, it is lost; and a row that another transaction has locked does not stop the others.
		execute(t, db, "UPDATE users SET locked_at = NULL WHERE id = 101")
		require.Eventually(t, func() bool { return held[1].Err() != nil }, time.Minute, time.Millisecond)
		assert.ErrorIs(t, held[1].Err(), locker.ErrNotHeld)
		for _, l := range held[2:] {
			require.NoError(t, l.Err())
		}
	})
}

// A batch that found its rows by a scan would wait for all that others have locked.
func TestARowBlockedByATransactionDoesNotStopTheBatch(t *testing.T) {
	for _, c := range []struct{ engine, key string }{
		{"postgres", "bigint"}, {"postgres", "text"}, {"postgres", "varchar(255)"},
		{"mysql", "BIGINT"}, {"mysql", "INT UNSIGNED"}, {"mysql", "VARBINARY(255)"}, {"mysql", "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"},
		{"mysql", "CHAR(36) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"},
	} {
		for _, owner := range []string{"locked_by", ""} {
			t.Run(c.engine+"/"+c.key+"/"+owner, func(t *testing.T) {
				d := fresh(t, engine(t, c.engine))
				db := d.pool(t)
				r := d.rows(t, db, c.key, users(owner, time.Minute))
				execute(t, db, "INSERT INTO users (id) VALUES ('6'), ('7'), ('8'), ('9')")
				a, err := r.Acquire(t.Context(), "7", "A", r.TTL())
				require.NoError(t, err)
				b, err := r.Acquire(t.Context(), "8", "A", r.TTL())
				require.NoError(t, err)
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				for _, blocked := range []string{"7", "6", "9"} { // in the list, and beside it
					unblock, err := block(t.Context(), d.Engine, d.pool(t), "users", "id", blocked)
					require.NoError(t, err)
					defer unblock()
					renewed, err := r.RenewBatch(ctx, []locker.Record{a, b}, r.TTL())
					require.NoError(t, err)
					got := make(map[string]locker.Record)
					for _, rec := range renewed {
						got[rec.Resource] = rec
					}
					require.Contains(t, got, "8")
					b = got["8"]
					if blocked == "7" {
						require.Len(t, got, 1)
					} else {
						require.Len(t, got, 2)
						a = got["7"]
					}
					unblock()
				}
				assert.NoError(t, r.Release(t.Context(), a))
				assert.NoError(t, r.Release(t.Context(), b))
			})
		}
	}
}

func TestFinish(t *testing.T) {
	everyRow(t, 700*time.Millisecond, func(t *testing.T, r *locker.RowTable, d database, db *sql.DB) {
		ctx := t.Context()
		acquire := func(owner string) locker.Record {
			rec, err := r.Acquire(ctx, "7", owner, r.TTL())
			require.NoError(t, err)
			return rec
		}
		expire := func() {
			require.Eventually(t, func() bool {
				_, err := r.Get(ctx, "7")
				return errors.Is(err, locker.ErrNotHeld)
			}, time.Minute, time.Millisecond)
		}
		cents := func() int64 { return number(t, db, "SELECT cents FROM users WHERE id = 7") }
		a := acquire("A")
		for set, args := range map[string][]any{"": nil, " \n": nil, "cents = ?": nil, "cents = 5": {1}, "name = '?'": nil, "name = 'what?'": {1}, "cents = ?, name = ?": {1}} {
			assert.ErrorIs(t, r.Finish(ctx, a, set, args...), locker.ErrInvalid, "%q", set)
		}
		if err := r.Finish(ctx, a, "cents = nowhere"); assert.Error(t, err, "an error of the database changes nothing") {
			assert.NotErrorIs(t, err, locker.ErrNotHeld)
		}
		assert.Error(t, r.Finish(ctx, a, "cents = 1 WHERE 1 = 1"), "a condition of its own is not possible")
		require.NoError(t, r.Finish(ctx, a, "cents = cents + ?, name = ? -- all: 'done', now", 5, "it's ?"))
		assert.EqualValues(t, 5, cents())
		assert.EqualValues(t, 1, number(t, db, "SELECT count(*) FROM users WHERE name = 'it''s ?'"))
		assert.Zero(t, number(t, db, "SELECT count(locked_at) + count(locked_by) FROM users"))
		assert.Zero(t, number(t, db, "SELECT cents FROM users WHERE id = 8"), "no other row")
		assert.ErrorIs(t, r.Finish(ctx, a, "cents = 6"), locker.ErrNotHeld, "once")

		late := acquire("A2")
		expire()
		b := acquire("B")
		assert.ErrorIs(t, r.Finish(ctx, late, "cents = 7"), locker.ErrNotOwner, "a late worker")
		assert.ErrorIs(t, r.Release(ctx, late), locker.ErrNotOwner)
		assert.EqualValues(t, 5, cents())
		expire()
		require.NoError(t, r.Finish(ctx, b, "cents = 8"), "late, but nobody else has come in")
		assert.EqualValues(t, 8, cents())
		assert.ErrorIs(t, r.Finish(ctx, late, "cents = 9"), locker.ErrNotHeld)
		assert.ErrorIs(t, r.Finish(ctx, locker.Record{Resource: "7", Owner: "B", Token: b.Token + int64(time.Hour/time.Microsecond)}, "cents = 9"), locker.ErrNotHeld)
		assert.EqualValues(t, 8, cents())
	})
}

// A session that finishes: no renewal comes between, the release finds it done, and a failure leaves the lease as it was.
func TestFinishUnderASession(t *testing.T) {
	everyRow(t, 1200*time.Millisecond, func(t *testing.T, r *locker.RowTable, d database, db *sql.DB) {
		ctx := t.Context()
		s := session(t, r)
		for i := range 12 { // through several renewals
			err := s.Do(ctx, "7", func(ctx context.Context, l *locker.Lease) error {
				time.Sleep(time.Duration(i) * 35 * time.Millisecond) // at any point of a beat
				failed := l.ReleaseWith(ctx, func(ctx context.Context, rec locker.Record) error { return r.Finish(ctx, rec, "cents = nowhere") })
				assert.Error(t, failed)
				assert.NotErrorIs(t, failed, locker.ErrLost)
				assert.NoError(t, l.Err(), "it goes on")
				return l.ReleaseWith(ctx, func(ctx context.Context, rec locker.Record) error { return r.Finish(ctx, rec, "cents = cents + 1") })
			})
			require.NoError(t, err)
		}
		assert.EqualValues(t, 12, number(t, db, "SELECT cents FROM users WHERE id = 7"))

		l := lock(t, s, "7")
		execute(t, db, "UPDATE users SET locked_at = NULL WHERE id = 7") // by an operator
		err := l.ReleaseWith(ctx, func(ctx context.Context, rec locker.Record) error { return r.Finish(ctx, rec, "cents = 0") })
		assert.ErrorIs(t, err, locker.ErrLost)
		assert.ErrorIs(t, l.Release(ctx), locker.ErrLost)
		assert.EqualValues(t, 12, number(t, db, "SELECT cents FROM users WHERE id = 7"))
	})
}

// An ORM that has read the row before the lock was taken, and saves all of its fields.
func TestAnORMThatMapsTheLockBreaksIt(t *testing.T) {
	everyRow(t, time.Minute, func(t *testing.T, r *locker.RowTable, d database, db *sql.DB) {
		ctx := t.Context()
		conn, err := db.Conn(ctx)
		require.NoError(t, err)
		defer conn.Close()
		var name string
		var lockedAt any
		require.NoError(t, conn.QueryRowContext(ctx, "SELECT name, locked_at FROM users WHERE id = 7").Scan(&name, &lockedAt))
		require.Nil(t, lockedAt)
		a, err := r.Acquire(ctx, "7", "A", r.TTL())
		require.NoError(t, err)

		execute(t, db, "UPDATE users SET name = 'new', cents = cents + 1 WHERE id = 7") // fields that are not the lock's
		a, err = r.Renew(ctx, a, r.TTL())
		require.NoError(t, err, "are none of its business")

		execute(t, db, "UPDATE users SET name = 'new', locked_at = NULL WHERE id = 7") // Save(user): what it read
		_, err = r.Acquire(ctx, "7", "B", r.TTL())
		require.NoError(t, err, "the mapped lock has let another in")
		_, err = r.Renew(ctx, a, r.TTL())
		assert.ErrorIs(t, err, locker.ErrNotOwner, "which the holder learns at its next renewal")
		assert.ErrorIs(t, r.Finish(ctx, a, "cents = 0"), locker.ErrNotOwner, "and before it does harm, with Finish")
		tx := begin(t, db)
		assert.ErrorIs(t, r.Guard(ctx, tx, a), locker.ErrLost, "or Guard")
	})
}

func TestRowTableRoundTrips(t *testing.T) {
	for _, e := range servers(t) {
		for _, owner := range []string{"locked_by", ""} {
			t.Run(e.Name+"/"+owner, func(t *testing.T) {
				d := fresh(t, e)
				wire := testdb.Proxy(t, d.dsn)
				through := database{d.Engine, wire.Through(d.dsn)}
				db := through.pool(t)
				db.SetMaxOpenConns(1)
				r := through.rows(t, db, "BIGINT", users(owner, time.Minute))
				execute(t, db, "INSERT INTO users (id) VALUES (7)")
				ctx := t.Context()
				var rec locker.Record
				walk := func() (trips []int) {
					count := func(err error) {
						trips = append(trips, wire.RoundTrips())
						wire.Reset()
						require.NoError(t, err)
					}
					wire.Reset()
					var err error
					rec, err = r.Acquire(ctx, "7", "A", r.TTL())
					count(err)
					rec, err = r.Renew(ctx, rec, r.TTL())
					count(err)
					_, err = r.Get(ctx, "7")
					count(err)
					rec, err = r.Handover(ctx, rec, "B", r.TTL())
					count(err)
					count(r.Release(ctx, rec))
					return trips
				}
				walk() // prepares
				assert.Equal(t, []int{1, 1, 1, 1, 1}, walk(), "acquire, renew, get, handover, release")
				rec, err := r.Acquire(ctx, "7", "A", r.TTL())
				require.NoError(t, err)
				wire.Reset()
				_, err = r.Acquire(ctx, "7", "B", r.TTL())
				require.ErrorIs(t, err, locker.ErrHeld)
				want := map[string]int{"postgres": 1, "mysql": 2}[e.Name]
				assert.Equal(t, want, wire.RoundTrips(), "a refused acquire")
				require.NoError(t, r.Release(ctx, rec))
			})
		}
	}
}

// A free row forgets, so a claim's clock is read after its wait for the row: else another could have come and gone meanwhile, with a
// higher token.
func TestAClaimThatWaitedHasTheHigherToken(t *testing.T) {
	everyRow(t, time.Minute, func(t *testing.T, r *locker.RowTable, d database, db *sql.DB) {
		for range 3 {
			unblock, err := block(t.Context(), d.Engine, db, "users", "id", "7")
			require.NoError(t, err)
			defer unblock()
			got := make(chan locker.Record, 1)
			go func() {
				rec, err := r.Acquire(t.Context(), "7", "A", r.TTL())
				assert.NoError(t, err)
				got <- rec
			}()
			if d.Name == "sqlite" {
				time.Sleep(50 * time.Millisecond) // nobody can see it wait; if it does not yet, nothing is shown
			} else {
				waiting(t, d.Engine, db)
			}
			another := map[string]string{ // the token of who came and went
				"postgres": "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
				"mysql":    "SELECT TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', UTC_TIMESTAMP(6))",
				"sqlite":   fmt.Sprintf("SELECT %d", time.Now().UnixMicro()),
			}[d.Name]
			token := number(t, db, another)
			unblock()
			rec := <-got
			assert.Greater(t, rec.Token, token)
			require.NoError(t, r.Release(t.Context(), rec))
		}
	})
}

// The statement was executed and its answer lost. With an owner of its own the same call does it again; without, nobody can tell.
func TestRowTableLostAnswers(t *testing.T) {
	for _, e := range servers(t) {
		for _, owner := range []string{"locked_by", ""} {
			t.Run(e.Name+"/"+owner, func(t *testing.T) {
				d := fresh(t, e)
				w := testdb.Proxy(t, d.dsn)
				through := database{d.Engine, w.Through(d.dsn)}
				direct := d.rows(t, d.pool(t), "BIGINT", users(owner, time.Minute))
				db := through.pool(t)
				r, err := locker.NewRowTable(t.Context(), db, dialect(e), users(owner, time.Minute))
				require.NoError(t, err)
				execute(t, db, "INSERT INTO users (id) VALUES (7)")
				lost := func(call func() error) {
					t.Helper()
					w.DropReplies(true)
					err := call()
					w.DropReplies(false)
					require.Error(t, err)
					require.NotErrorIs(t, err, locker.ErrHeld)
					require.NotErrorIs(t, err, locker.ErrNotOwner)
					require.NotErrorIs(t, err, locker.ErrNotHeld)
				}
				verdict := func(err, without error) {
					t.Helper()
					if owner != "" {
						require.NoError(t, err)
					} else {
						require.ErrorIs(t, err, without)
					}
				}
				lost(func() error { _, err := r.Acquire(t.Context(), "7", "A", r.TTL()); return err })
				rec, err := r.Acquire(t.Context(), "7", "A", r.TTL())
				verdict(err, locker.ErrHeld)
				if owner == "" {
					seen, err := direct.Get(t.Context(), "7")
					require.NoError(t, err)
					require.NoError(t, direct.Release(t.Context(), seen))
					rec, err = r.Acquire(t.Context(), "7", "A", r.TTL())
					require.NoError(t, err)
				}
				lost(func() error { _, err := r.Renew(t.Context(), rec, r.TTL()); return err })
				again, err := r.Renew(t.Context(), rec, r.TTL())
				verdict(err, locker.ErrNotOwner)
				tx := begin(t, db)
				err = r.Guard(t.Context(), tx, rec)
				verdict(err, locker.ErrLost)
				tx.Rollback()
				if owner == "" {
					again, err = direct.Get(t.Context(), "7")
					require.NoError(t, err)
				}
				lost(func() error { return r.Finish(t.Context(), again, "cents = cents + 1") })
				require.ErrorIs(t, r.Finish(t.Context(), again, "cents = cents + 1"), locker.ErrNotHeld)
				assert.EqualValues(t, 1, number(t, db, "SELECT cents FROM users"), "once")
				rec, err = r.Acquire(t.Context(), "7", "B", r.TTL())
				require.NoError(t, err)
				lost(func() error { return r.Release(t.Context(), rec) })
				require.ErrorIs(t, r.Release(t.Context(), rec), locker.ErrNotHeld)
			})
		}
	}
}

// Tables whose columns are named like what the statements name, or that are stored in ways of their own.
func TestRowTableOddTables(t *testing.T) {
	for _, c := range []struct{ engine, ddl, insert, key, at, by string }{
		{"postgres", `CREATE TABLE users (o bigint PRIMARY KEY, at timestamptz, k text)`, `INSERT INTO users VALUES (7)`, "o", "at", "k"},
		{"postgres", `CREATE TABLE users ("user" bigint PRIMARY KEY, l timestamptz, t text, now int, resource text)`, `INSERT INTO users VALUES (7)`, "user", "l", "t"},
		{"postgres", `CREATE TABLE users (id bigint PRIMARY KEY, u timestamptz, want text) PARTITION BY RANGE (id); CREATE TABLE users_1 PARTITION OF users FOR VALUES FROM (0) TO (100)`, `INSERT INTO users VALUES (7)`, "id", "u", "want"},
		{"postgres", `CREATE TABLE users (id bigint PRIMARY KEY, "At" timestamptz, "Owner" text)`, `INSERT INTO users VALUES (7)`, "id", "At", "Owner"},
		{"mysql", "CREATE TABLE users (t BIGINT PRIMARY KEY, j DATETIME(6), owner VARBINARY(255), token INT, locker INT)", `INSERT INTO users (t) VALUES (7)`, "t", "j", "owner"},
		{"mysql", "CREATE TABLE users (id BIGINT, j DATETIME(6), `l` VARBINARY(255), UNIQUE KEY `odd ``name` (id))", `INSERT INTO users (id) VALUES (7)`, "id", "j", "l"},
		{"mysql", "CREATE TABLE users (id BIGINT PRIMARY KEY, j DATETIME(6), `l` VARBINARY(255)) PARTITION BY HASH(id) PARTITIONS 4", `INSERT INTO users (id) VALUES (7)`, "id", "j", "l"},
		{"sqlite", "CREATE TABLE users (u INTEGER PRIMARY KEY, value INTEGER, key TEXT, type TEXT, atom TEXT)", `INSERT INTO users (u) VALUES (7)`, "u", "value", "key"},
		{"sqlite", "CREATE TABLE users (id INT PRIMARY KEY, value INTEGER, j TEXT) WITHOUT ROWID", `INSERT INTO users (id) VALUES (7)`, "id", "value", "j"},
		{"sqlite", "CREATE TABLE users (id INTEGER PRIMARY KEY, value TEXT, j TEXT) STRICT", `INSERT INTO users (id) VALUES (7)`, "id", "value", "j"},
		{"sqlite", "CREATE TABLE users (id INTEGER PRIMARY KEY, value INTEGER, j TEXT) STRICT", `INSERT INTO users (id) VALUES (7)`, "id", "value", "j"},
		{"sqlite", "CREATE TABLE users (id INTEGER PRIMARY KEY, value INTEGER, j ANY) STRICT", `INSERT INTO users (id) VALUES (7)`, "id", "value", "j"},
	} {
		for _, owner := range []string{c.by, ""} {
			t.Run(c.engine+"/"+c.ddl+"/"+owner, func(t *testing.T) {
				d := fresh(t, engine(t, c.engine))
				db := d.pool(t)
				execute(t, db, c.ddl)
				execute(t, db, c.insert)
				r, err := locker.NewRowTable(t.Context(), db, dialect(d.Engine), locker.RowSpec{Table: "users", Key: c.key, LockedAt: c.at, Owner: owner, TTL: time.Minute})
				require.NoError(t, err)
				rec, err := r.Acquire(t.Context(), "7", "A", r.TTL())
				require.NoError(t, err)
				_, err = r.Acquire(t.Context(), "7", "B", r.TTL())
				require.ErrorIs(t, err, locker.ErrHeld)
				rec, err = r.Renew(t.Context(), rec, r.TTL())
				require.NoError(t, err)
				recs, err := r.RenewBatch(t.Context(), []locker.Record{rec}, r.TTL())
				require.NoError(t, err)
				require.Len(t, recs, 1)
				tx := begin(t, db)
				require.NoError(t, r.Guard(t.Context(), tx, recs[0]))
				require.NoError(t, tx.Commit())
				rec, err = r.Handover(t.Context(), recs[0], "B", r.TTL())
				require.NoError(t, err)
				require.NoError(t, r.Release(t.Context(), rec))
			})
		}
	}
}

// The text is the caller's: colons, quotes, casts and comments in it are not ours.
func TestFinishTakesTheTextAsItIs(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			r, _, db := rowTable(t, e, "locked_by", time.Minute)
			cases := []struct {
				set  string
				args []any
				name string
			}{
				{"name = '12:00'", nil, "12:00"}, {"name = ':resource'", nil, ":resource"}, {"name = 'a::b'", nil, "a::b"}, {"name = 'it''s', cents = 1", nil, "it's"},
				{"name = ?, cents = cents + ?", []any{"x:y?", 2}, "x:y?"}, {"cents = ?,\nname = ? -- done", []any{int32(5), "c"}, "c"}, {"name = ? /* why: :owner */", []any{"d"}, "d"},
			}
			if e.Name == "postgres" {
				cases = append(cases, cases[0])
				cases[0].set, cases[0].args, cases[0].name = "name = ?::int::text || CAST(? AS text)", []any{"7", ":"}, "7:"
			}
			for _, c := range cases {
				rec, err := r.Acquire(t.Context(), "7", "A", r.TTL())
				require.NoError(t, err)
				require.NoError(t, r.Finish(t.Context(), rec, c.set, c.args...), c.set)
				var name string
				require.NoError(t, db.QueryRowContext(t.Context(), "SELECT name FROM users WHERE id = 7").Scan(&name))
				assert.Equal(t, c.name, name, c.set)
			}
			rec, err := r.Acquire(t.Context(), "7", "A", r.TTL())
			require.NoError(t, err)
			err = r.Finish(t.Context(), rec, "name = ?", nil)
			require.Error(t, err, "NOT NULL")
			assert.NotContains(t, err.Error(), "autocommit")
			require.NoError(t, r.Release(t.Context(), rec), "as it was")
		})
	}
}

// A trigger of the table takes the LastInsertId out of MySQL's answer: a grant must not look like a refusal.
func TestRowTableUnderATrigger(t *testing.T) {
	d := fresh(t, testdb.MySQL(t))
	db := d.pool(t)
	r := d.rows(t, db, "BIGINT", users("locked_by", time.Minute))
	without, err := locker.NewRowTable(t.Context(), db, dialect(d.Engine), users("", time.Minute))
	require.NoError(t, err)
	execute(t, db, "INSERT INTO users (id) VALUES (7)")
	execute(t, db, "CREATE TRIGGER audit BEFORE UPDATE ON users FOR EACH ROW SET @seen = 1")
	rec, err := r.Acquire(t.Context(), "7", "A", r.TTL())
	require.NoError(t, err)
	_, err = r.Acquire(t.Context(), "7", "B", r.TTL())
	require.ErrorIs(t, err, locker.ErrHeld)
	renewed, err := r.Renew(t.Context(), rec, r.TTL())
	require.NoError(t, err)
	assert.Greater(t, renewed.Token, rec.Token)
	given, err := r.Handover(t.Context(), renewed, "B", r.TTL())
	require.NoError(t, err)
	require.NoError(t, r.Release(t.Context(), given))

	_, err = locker.NewRowTable(t.Context(), db, dialect(d.Engine), users("", time.Minute))
	require.ErrorIs(t, err, locker.ErrInvalid)
	assert.ErrorContains(t, err, "trigger")
	_, err = without.Acquire(t.Context(), "7", "A", r.TTL()) // it came later
	assert.ErrorContains(t, err, "trigger")
	assert.NotErrorIs(t, err, locker.ErrHeld)
}

// A row that was locked into the future by hand keeps that to itself when it is renewed beside others, and stays locked.
func TestABatchDoesNotSpreadAFutureTime(t *testing.T) {
	everyRow(t, time.Minute, func(t *testing.T, r *locker.RowTable, d database, db *sql.DB) {
		if !strings.Contains(t.Name(), "locked_by") {
			t.Skip("the token moved by hand is no grant's")
		}
		a, err := r.Acquire(t.Context(), "7", "A", r.TTL())
		require.NoError(t, err)
		b, err := r.Acquire(t.Context(), "8", "A", r.TTL())
		require.NoError(t, err)
		execute(t, db, "UPDATE users SET locked_at = "+map[string]string{"sqlite": "4070908800000000"}[d.Name]+
			map[string]string{"postgres": "'2099-01-01Z'", "mysql": "'2099-01-01'"}[d.Name]+" WHERE id = 7")
		renewed, err := r.RenewBatch(t.Context(), []locker.Record{a, b}, r.TTL())
		require.NoError(t, err)
		require.Len(t, renewed, 2)
		for _, rec := range renewed {
			seen, err := r.Get(t.Context(), rec.Resource)
			require.NoError(t, err)
			assert.Equal(t, rec.Token, seen.Token)
			assert.Equal(t, map[string]int{"7": 2099, "8": time.Now().UTC().Year()}[rec.Resource], seen.AcquiredAt.Year())
		}
	})
}

func TestARenewalNeverFreesTheLastTimeThereIs(t *testing.T) {
	for _, c := range []struct{ engine, at, value string }{
		{"mysql", "DATETIME(6)", "'9999-12-31 23:59:59.999999'"},
		{"sqlite", "TEXT", "'9999-12-31 23:59:59.999999'"}, {"sqlite", "TEXT", "'forever'"}, {"sqlite", "INTEGER", "'forever'"},
	} {
		d := fresh(t, engine(t, c.engine))
		db := d.pool(t)
		create(t, d, db, "BIGINT", c.at)
		execute(t, db, "INSERT INTO users (id) VALUES (7)")
		r, err := locker.NewRowTable(t.Context(), db, dialect(d.Engine), users("locked_by", time.Minute))
		require.NoError(t, err)
		a, err := r.Acquire(t.Context(), "7", "A", r.TTL())
		require.NoError(t, err)
		execute(t, db, "UPDATE users SET locked_at = "+c.value)
		for range 2 {
			_, err = r.Renew(t.Context(), a, r.TTL())
			require.NoError(t, err)
			_, err = r.RenewBatch(t.Context(), []locker.Record{a}, r.TTL())
			require.NoError(t, err)
		}
		_, err = r.Acquire(t.Context(), "7", "B", r.TTL())
		assert.ErrorIs(t, err, locker.ErrHeld, "%v", c)
	}
}

// Tables in which one lock would be two, or two owners one.
func TestRowTableRefusesWhatWouldGrantTwice(t *testing.T) {
	for _, c := range []struct {
		engine, ddl, table, owner, wrong string
	}{
		{"postgres", "CREATE TABLE users (id bigint PRIMARY KEY, locked_at timestamptz, locked_by text); CREATE TABLE vip () INHERITS (users)", "users", "locked_by", "INHERIT"},
		{"mysql", "CREATE TABLE users (id INT(10) ZEROFILL PRIMARY KEY, locked_at DATETIME(6), locked_by VARBINARY(255))", "users", "locked_by", "0000000007"},
		{"sqlite", "CREATE TABLE users (id INTEGER PRIMARY KEY, locked_at INTEGER, locked_by STRING)", "users", "locked_by", "declare it TEXT"},
		{"sqlite", "CREATE TABLE users (id INTEGER PRIMARY KEY, locked_at INTEGER, locked_by INTEGER)", "users", "locked_by", "declare it TEXT"},
		{"sqlite", "CREATE TABLE users (id INTEGER PRIMARY KEY, locked_at INTEGER, locked_by TEXT)", "users", "lockedby", "2 of the 3 columns"},
	} {
		d := fresh(t, engine(t, c.engine))
		db := d.pool(t)
		execute(t, db, c.ddl)
		_, err := locker.NewRowTable(t.Context(), db, dialect(d.Engine),
			locker.RowSpec{Table: c.table, Key: "id", LockedAt: "locked_at", Owner: c.owner, TTL: time.Minute})
		require.ErrorIs(t, err, locker.ErrInvalid, c.ddl)
		assert.ErrorContains(t, err, c.wrong)
	}
}
