package main

import (
	"cmp"
	"database/sql"
	"errors"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/locker-go/locker"
)

// database is what a DSN names.
type database struct {
	dialect   locker.Dialect
	db        *sql.DB
	file      string // of SQLite
	isDefault bool
	secrets   []string // never to be printed
}

// parseDSN opens the database of a DSN; nothing is sent, and no file created, before it is used. Its errors tell nothing of the DSN:
// where it is broken nobody can say which part was meant to be the password.
func parseDSN(dsn string) (d *database, err error) {
	switch scheme, rest, _ := strings.Cut(dsn, ":"); {
	case dsn == "":
		d, err = openDefault()
	case scheme == "sqlite":
		d, err = openSQLite(rest)
	case strings.HasPrefix(dsn, "postgres://"), strings.HasPrefix(dsn, "postgresql://"):
		d, err = openPostgres(dsn)
	case strings.HasPrefix(dsn, "mysql://"):
		d, err = openMySQL(dsn)
	case strings.HasPrefix(dsn, "http://"), strings.HasPrefix(dsn, "https://"):
		return nil, fail(exitUsage, "a DSN with http:// or https:// is not supported yet in this build; use sqlite:PATH, postgres://… or mysql://…")
	default:
		return nil, fail(exitUsage, "the DSN is of no kind that is known; write sqlite:PATH, postgres://user:password@host/database or mysql://user:password@host:3306/database")
	}
	if err != nil {
		return nil, err
	}
	d.db.SetMaxOpenConns(2) // one lease, one command: a request and one that is stuck
	return d, nil
}

// openDefault is a file that every user has, whatever the folder he stands in.
func openDefault() (*database, error) {
	folder, err := stateFolder()
	if err != nil {
		return nil, fail(exitUsage, "no folder for the default lock file: %v; name a database with --dsn or LOCKER_DSN", err)
	}
	d, err := openSQLite(filepath.Join(folder, "locker", "locker.db"))
	if err == nil {
		d.isDefault = true
	}
	return d, err
}

func stateFolder() (string, error) {
	switch runtime.GOOS {
	case "windows":
		return os.UserCacheDir() // %LocalAppData%: stays on this machine
	case "darwin":
		return os.UserConfigDir() // ~/Library/Application Support
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) { // a relative one is to be ignored, says the specification
		return dir, nil
	}
	home, err := os.UserHomeDir()
	if err == nil && !filepath.IsAbs(home) {
		err = errors.New("HOME is not an absolute path")
	}
	return filepath.Join(home, ".local", "state"), err
}

// makeFolder makes the folder of the default file. That of a file which the user named is his to make: a typo should not grow one.
func (d *database) makeFolder() error {
	if !d.isDefault {
		return nil
	}
	return os.MkdirAll(filepath.Dir(d.file), 0o700)
}

func openSQLite(path string) (*database, error) {
	switch {
	case path == "":
		return nil, fail(exitUsage, "the DSN names no file; write sqlite:PATH")
	case strings.HasPrefix(path, ":memory:"):
		return nil, fail(exitUsage, "a database in memory ends with this command; write sqlite:PATH")
	case strings.HasPrefix(path, "//") && !strings.HasPrefix(path, "///"):
		return nil, fail(exitUsage, "a file is named sqlite:PATH, without //")
	}
	file, err := filepath.Abs(path)
	if err != nil {
		return nil, fail(exitUsage, "the lock file: %v", err)
	}
	db, err := sql.Open("sqlite", sqliteURI(file))
	return &database{dialect: locker.SQLite(), db: db, file: file}, err
}

// sqliteURI is the absolute path file as a URI (https://sqlite.org/uri.html) with what many processes on one file need: wait for
// each other, never upgrade a read lock, and sync at checkpoints only. No context ends SQLite's own wait, so that is short, and the
// library, which listens to the context, repeats it.
func sqliteURI(file string) string {
	file = filepath.ToSlash(file)
	if !strings.HasPrefix(file, "/") {
		file = "/" + file // C:/…
	}
	file = strings.NewReplacer("%", "%25", "?", "%3F", "#", "%23").Replace(file)
	return "file://" + file + "?_pragma=busy_timeout(100)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_txlock=immediate"
}

func openPostgres(dsn string) (*database, error) {
	const form = "postgres://user:password@host:5432/database?sslmode=…"
	if err := checkCredentials(dsn, form); err != nil {
		return nil, err
	}
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		var broken *pgconn.ParseConfigError
		reason := ""
		// Its text is "cannot parse `DSN`: reason", and the reason is enough.
		if i := strings.LastIndex(err.Error(), "`: "); errors.As(err, &broken) && i >= 0 {
			reason = ": " + conceal(err.Error()[i+3:], credentials(dsn))
		}
		return nil, fail(exitUsage, "the DSN is broken%s; it is written %s", reason, form)
	}
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = "locker"
	}
	return &database{
		dialect: locker.Postgres(),
		db:      stdlib.OpenDB(*config),
		secrets: append(credentials(dsn), config.Password),
	}, nil
}

// openMySQL converts the URL to what go-sql-driver takes. The parameters are the driver's; socket=PATH is a Unix socket.
func openMySQL(dsn string) (*database, error) {
	const form = "mysql://user:password@host:3306/database?…"
	if err := checkCredentials(dsn, form); err != nil {
		return nil, err
	}
	u, err := url.Parse(dsn)
	if err != nil || u.Opaque != "" || u.Fragment != "" {
		return nil, fail(exitUsage, "the DSN is broken; it is written %s, with %% codes for special characters", form)
	}
	query := u.Query()
	network, address := "tcp", net.JoinHostPort(cmp.Or(u.Hostname(), "127.0.0.1"), cmp.Or(u.Port(), "3306"))
	if socket := query.Get("socket"); socket != "" {
		network, address = "unix", socket
	}
	params := make([]string, 0, len(query))
	for _, p := range strings.Split(u.RawQuery, "&") {
		if p != "" && !strings.HasPrefix(p, "socket=") {
			params = append(params, strings.ReplaceAll(p, "/", "%2F")) // the driver looks for the last "/"
		}
	}
	name := strings.TrimPrefix(u.EscapedPath(), "/")
	// User and password are set apart, so that no error of the parser can contain them, nor a character in them confuse it.
	config, err := mysql.ParseDSN(network + "(" + address + ")/" + strings.ReplaceAll(name, "/", "%2F") + "?" + strings.Join(params, "&"))
	if err != nil {
		return nil, fail(exitUsage, "the DSN is broken: %s; it is written %s", conceal(err.Error(), credentials(dsn)), form)
	}
	config.User = u.User.Username()
	config.Passwd, _ = u.User.Password()
	config.Logger = &mysql.NopLogger{} // it would write to stderr what comes back as an error anyway
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return nil, fail(exitUsage, "the DSN is broken; it is written %s", form)
	}
	return &database{
		dialect: locker.MySQL(),
		db:      sql.OpenDB(connector),
		secrets: append(credentials(dsn), config.Passwd),
	}, nil
}

// checkCredentials refuses a DSN in which a part of the password could be taken for the host or the database, and then end up in a
// message: a second "@", or a "/", "?" or "#" before it.
func checkCredentials(dsn, form string) error {
	_, rest, _ := strings.Cut(dsn, "://")
	at := strings.LastIndex(rest, "@")
	if at >= 0 && strings.ContainsAny(rest[:at], "@/?#") {
		return fail(exitUsage, "the DSN is ambiguous: write %%40 for @, %%2F for /, %%3F for ? and %%23 for # in its parts; it is written %s", form)
	}
	return nil
}

// credentials are the parts of a DSN that may be a password, as they are written and as they are meant.
func credentials(dsn string) []string {
	var all []string
	add := func(s string) {
		all = append(all, s)
		if meant, err := url.PathUnescape(s); err == nil {
			all = append(all, meant)
		}
	}
	_, rest, _ := strings.Cut(dsn, "://")
	if at := strings.LastIndex(rest, "@"); at >= 0 {
		_, password, _ := strings.Cut(rest[:at], ":")
		add(password)
	}
	_, query, _ := strings.Cut(rest, "?")
	for _, p := range strings.Split(query, "&") {
		if key, value, _ := strings.Cut(p, "="); strings.Contains(strings.ToLower(key), "pass") {
			add(value)
		}
	}
	return all
}

const concealed = "xxxxx"

var (
	inURL     = regexp.MustCompile(`(?s)://.*@[^\s"` + "`" + `]*`)
	inDSN     = regexp.MustCompile(`\S+@(tcp|unix)\(`)
	inSetting = regexp.MustCompile(`(?i)(pass(?:word|wd)?|pwd)=('[^']*'|[^\s&]*)`)
	lineEnd   = regexp.MustCompile(`\s*[\r\n]\s*`)
)

// conceal makes text that others wrote fit to be printed: it blots out the secrets and all that looks like one, such as in an argument
// that was meant to be the value of --dsn, and leaves one line.
func conceal(text string, secrets []string) string {
	for _, s := range secrets {
		if len(s) > 2 { // shorter ones are in every word
			text = strings.ReplaceAll(text, s, concealed)
		}
	}
	text = inURL.ReplaceAllString(text, "://"+concealed)
	text = inDSN.ReplaceAllString(text, concealed+"@$1(")
	text = inSetting.ReplaceAllString(text, "$1="+concealed)
	return lineEnd.ReplaceAllString(text, " ")
}
