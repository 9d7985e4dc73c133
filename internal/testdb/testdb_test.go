package testdb

import (
	"database/sql"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryDSNIsAFreshEmptyDatabase(t *testing.T) {
	for _, e := range append(Engines(t), SQLitePlain(t)) {
		t.Run(e.Name, func(t *testing.T) {
			t.Parallel()
			dsn := e.DSN(t)
			one, again, other := Open(t, e.Driver, dsn), Open(t, e.Driver, dsn), e.Open(t)
			_, err := one.Exec("CREATE TABLE things (id INT PRIMARY KEY)")
			require.NoError(t, err)
			_, err = again.Exec("INSERT INTO things VALUES (1)")
			require.NoError(t, err)
			_, err = other.Exec("INSERT INTO things VALUES (1)")
			require.Error(t, err, "another test's table is in sight")
		})
	}
}

func TestADatabaseIsDroppedAtTheTestsEnd(t *testing.T) {
	servers(t, func(t *testing.T, e Engine) { // SQLite's is a file in t.TempDir
		db := e.Open(t)
		there := func() int {
			return queryInt(t, db, "SELECT count(*) FROM information_schema.tables WHERE table_name = 'dropped_at_the_end'")
		}
		t.Run("inner", func(t *testing.T) {
			_, err := e.Open(t).Exec("CREATE TABLE dropped_at_the_end (id INT)")
			require.NoError(t, err)
			require.Equal(t, 1, there())
		})
		require.Equal(t, 0, there())
	})
}

func queryInt(t testing.TB, db *sql.DB, query string) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRow(query).Scan(&n))
	return n
}

func servers(t *testing.T, f func(*testing.T, Engine)) {
	for _, e := range Engines(t) {
		if e.Name != "sqlite" {
			t.Run(e.Name, func(t *testing.T) { f(t, e) })
		}
	}
}

func TestParametersReachTheDatabase(t *testing.T) {
	for name, c := range map[string]struct{ param, query, want string }{
		"postgres": {"application_name=a b&c", "SHOW application_name", "a b&c"},
		"mysql":    {"time_zone='+03:00'", "SELECT @@time_zone", "+03:00"},
		"sqlite":   {"_pragma=busy_timeout(77)", "PRAGMA busy_timeout", "77"},
	} {
		for _, e := range Engines(t) {
			if e.Name != name {
				continue
			}
			t.Run(name, func(t *testing.T) {
				var got string
				require.NoError(t, e.Open(t, c.param).QueryRow(c.query).Scan(&got))
				require.Equal(t, c.want, got)
			})
		}
	}
}

func TestWithParams(t *testing.T) {
	for _, c := range []struct {
		dsn    string
		params []string
		want   string
	}{
		{"file:x", nil, "file:x"},
		{"file:x", []string{"_pragma=a(1)", "_pragma=b(2)", "_pragma=a(3)"}, "file:x?_pragma=b(2)&_pragma=a(3)"},
		{"root@tcp(h:1)/d?a=1&b=2", []string{"a=3", "c='x y'"}, "root@tcp(h:1)/d?b=2&a=3&c=%27x%20y%27"},
	} {
		require.Equal(t, c.want, withParams(c.dsn, c.params...))
	}
}

func TestTheEnvironmentNamesTheServer(t *testing.T) {
	for _, name := range []string{"postgres", "mysql"} {
		t.Run(name, func(t *testing.T) {
			s := Start(t, name, Options{})
			t.Setenv(s.kind.env, s.kind.dsn(s.port))
			db := s.kind.need(t).Open(t)
			var data string
			require.NoError(t, db.QueryRow(s.kind.identity).Scan(&data))
			require.Contains(t, data, s.dir)
		})
	}
}
