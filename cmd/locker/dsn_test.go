package main

import (
	"net/url"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/locker-go/locker/internal/testdb"
)

const password = "hunter2secret"

// No part of a password is ever printed, whatever is wrong with the DSN, or with the database behind it.
func TestPasswordIsNeverPrinted(t *testing.T) {
	at := nobody(t)
	for _, dsn := range []string{
		"postgres://joe:" + password + "@" + at + "/db",
		"postgresql://joe:" + password + "@" + at + "/db?sslmode=disable",
		"postgres://joe:" + password + "@" + at + "/db?sslmode=nonsense",
		"postgres://joe:" + password + "@" + at + "/db?connect_timeout=" + password,
		"postgres://joe@" + at + "/db?password=" + password,
		"postgres://joe@" + at + "/db?sslmode=disable&sslpassword=" + password + "=x",
		"postgres://joe:" + password + "@[::1/db",
		"postgres://joe:" + password + "@h:port/db",
		"postgres://joe:" + password + ":" + password + "/db",
		"postgres://joe:%zz" + password + "@" + at + "/db",
		"postgres://joe:%68unter2secret@" + at + "/db?sslmode=nonsense",
		"postgres:joe:" + password + "@" + at,
		"host=" + at + " user=joe password=" + password,
		"joe:" + password + "@tcp(" + at + ")/db",
		"http://joe:" + password + "@" + at + "/",
		password,
		password + "://" + at,
		"mysql://joe:" + password + "@" + at + "/db",
		"mysql://joe:" + password + "@tcp(" + at + ")/db",
		"mysql://joe:" + password + "@" + at + "/db?parseTime=" + password,
		"mysql://joe:" + password + "@" + at + "/db?tls=" + password,
		"mysql://joe:" + password + "@h:port/db",
		"mysql://joe:%zz" + password + "@" + at + "/db",
		"mysql://joe:1" + password + "%",
		"mysql:joe:" + password + "@" + at,
		// The characters that end a part of a URL, inside the password and not coded.
		"mysql://joe:1/" + password + "@" + at + "/db", "postgres://joe:1/" + password + "@" + at + "/db",
		"mysql://joe:1?" + password + "@" + at + "/db", "postgres://joe:1?" + password + "@" + at + "/db",
		"mysql://joe:1#" + password + "@" + at + "/db", "postgres://joe:1#" + password + "@" + at + "/db",
		"mysql://joe:1@" + password + "@" + at + "/db", "postgres://joe:1@" + password + "@" + at + "/db",
		"mysql://joe:1@/" + password + "@" + at + "/db", "postgres://joe:1@/" + password + "@" + at + "/db",
		"mysql://joe:1:" + password + "@" + at + "/db", "postgres://joe:1:" + password + "@" + at + "/db",
		"mysql://joe:1 " + password + "@" + at + "/db", "postgres://joe:1 " + password + "@" + at + "/db",
		"mysql://joe:1\n" + password + "@" + at + "/db", "postgres://joe:1\n" + password + "@" + at + "/db",
	} {
		for _, args := range [][]string{
			{"--dsn", dsn, "get", "r"},
			{"--dsn", dsn, "run", "r", "--", "true"},
			{"--dsn", dsn, "init", "--print"},
			{"get", "r", dsn},    // --dsn forgotten
			{dsn, "get", "r"},    // likewise
			{"--" + dsn, "ls"},   // a slip of the fingers
			{"ls", "--ttl", dsn}, // likewise
			{"run", "r", "--ttl", dsn, "--", "true"},
			{"run", "r", "-E", dsn, "--", "true"},
		} {
			if args[0] != "--dsn" && (!strings.Contains(dsn, "://") || !strings.Contains(dsn, "@") || dsn == password) {
				continue // nothing shows that it is a DSN
			}
			var out, errs strings.Builder
			code := execute(args, &out, &errs)
			assert.NotContains(t, out.String()+errs.String(), "unter2", "%q", args)
			if len(args) < 3 || args[2] != "init" {
				assert.Contains(t, []int{exitUsage, exitUnavailable}, code, "%q: %s", args, errs.String())
				assert.Equal(t, 1, strings.Count(errs.String(), "\n"), "%q: one line: %s", args, errs.String())
				assert.True(t, strings.HasPrefix(errs.String(), "locker: "), errs.String())
			}
		}
	}
}

// A server that refuses the password says so, and the way out is the exit code 69.
func TestPasswordOfALiveServer(t *testing.T) {
	t.Run("postgres", func(t *testing.T) {
		w := emptyWorld(t, testdb.Postgres(t))
		w.dsn = withUser(t, w.dsn, "nobody", "p@:/?#%"+password)
		r := w.run("get", "r")
		assert.Equal(t, exitUnavailable, r.code)
		assert.NotContains(t, r.err, "unter2")
		assert.Contains(t, r.err, "nobody")
	})
	t.Run("mysql", func(t *testing.T) {
		w := newWorld(t, testdb.MySQL(t))
		_, err := w.db.db.Exec("CREATE USER IF NOT EXISTS 'o''neil'@'%' IDENTIFIED BY 'p@:/?#%hunter2secret'")
		require.NoError(t, err)
		_, err = w.db.db.Exec("GRANT SELECT ON *.* TO 'o''neil'@'%'")
		require.NoError(t, err)
		dsn := w.dsn
		w.dsn = withUser(t, dsn, "o'neil", "p@:/?#%"+password) + "?time_zone='%2B03:00'&parseTime=true&loc=Europe/Paris"
		assert.Equal(t, result{exitFree, "", "locker: \"r\": nobody holds it\n"}, w.run("get", "r"), "special characters in the password")
		r := w.run("acquire", "r")
		assert.Equal(t, exitUnavailable, r.code, "no privilege to write")
		assert.NotContains(t, r.err, "unter2")
		w.dsn = withUser(t, dsn, "o'neil", password)
		r = w.run("get", "r")
		assert.Equal(t, exitUnavailable, r.code)
		assert.NotContains(t, r.err, "unter2")
	})
}

func withUser(t *testing.T, dsn, user, password string) string {
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	u.User = url.UserPassword(user, password)
	return u.String()
}

func TestDSNOfEveryKind(t *testing.T) {
	for _, dsn := range []string{
		"postgres://h1,h2/db", "postgres://h1:1,h2:2/db?target_session_attrs=read-write", "postgresql:///db?host=/run/postgresql",
		"postgres://", "mysql://", "mysql://h", "mysql://h/", "mysql://root@[::1]:3307/db", "mysql://root@/db?socket=/run/mysqld/mysqld.sock",
		"mysql://u:a%2Fb@h/d%2Fb?loc=Europe/Berlin&charset=utf8mb4,utf8", "sqlite:x.db", "sqlite:/x.db", "sqlite:///x.db", "",
	} {
		d, err := parseDSN(dsn)
		if assert.NoError(t, err, dsn) {
			d.db.Close()
		}
	}
	for _, dsn := range []string{"sqlite:", "sqlite::memory:", "sqlite://x.db", "x.db", "http://h", "https://h", "oracle://h", "postgres:h", "mysql:h", "mysql://h/d#x", " "} {
		_, err := parseDSN(dsn)
		var e *exitError
		if assert.ErrorAs(t, err, &e, dsn) {
			assert.Equal(t, exitUsage, e.code, dsn)
		}
	}
}

// The path of a SQLite file is taken as it is.
func TestSQLitePathIsTakenLiterally(t *testing.T) {
	dir := t.TempDir()
	names := []string{"plain", "with space", "50%", "%41", "x+y", "&=;,"}
	if runtime.GOOS != "windows" {
		names = append(names, "what?", "a?b=c&mode=memory", "#1", "quote'\"", `back\slash`)
	}
	for _, name := range names {
		file := filepath.Join(dir, name)
		var out, errs strings.Builder
		require.Equal(t, 0, execute([]string{"--dsn", "sqlite:" + file, "acquire", "r"}, &out, &errs), errs.String())
		assert.FileExists(t, file)
	}
}

func TestDefaultFileNeedsAHome(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("environment of Linux")
	}
	t.Setenv("XDG_STATE_HOME", "relative")
	t.Setenv("HOME", "")
	var out, errs strings.Builder
	assert.Equal(t, exitUsage, execute([]string{"get", "r"}, &out, &errs))
	assert.Contains(t, errs.String(), "LOCKER_DSN")
}
