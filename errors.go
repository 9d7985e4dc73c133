package locker

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// Errors of drivers are told apart by what they carry, so that no driver is imported.

// sqlState returns the SQLSTATE of a PostgreSQL error (pgx, lib/pq), or "".
func sqlState(err error) string {
	var e interface{ SQLState() string }
	if errors.As(err, &e) {
		return e.SQLState()
	}
	return ""
}

// sqliteCode returns the result code of an SQLite error (method Code of modernc's, field ExtendedCode of mattn's), or 0.
func sqliteCode(err error) int {
	var e interface{ Code() int }
	if errors.As(err, &e) {
		return e.Code()
	}
	return numberField(err, "ExtendedCode")
}

// mysqlNumber returns the number of an error of a MySQL or MariaDB server (field Number of go-sql-driver's), or 0.
func mysqlNumber(err error) int { return numberField(err, "Number") }

// numberField looks through err and what it wraps for a struct with an integer field of that name.
func numberField(err error, name string) int {
	for err != nil {
		if v := reflect.Indirect(reflect.ValueOf(err)); v.Kind() == reflect.Struct {
			switch f := v.FieldByName(name); {
			case f.CanInt():
				return int(f.Int())
			case f.CanUint():
				return int(f.Uint())
			}
		}
		if many, ok := err.(interface{ Unwrap() []error }); ok {
			for _, err := range many.Unwrap() {
				if n := numberField(err, name); n != 0 {
					return n
				}
			}
			return 0
		}
		err = errors.Unwrap(err)
	}
	return 0
}

// permanent reports whether trying again cannot help until somebody changes the set-up: no table, no privilege, a statement or a
// value that the server refuses. Everything else (the network, a server that restarts, is read-only after a fail-over or has no
// room) may pass, and so may what this function does not know.
func permanent(err error) bool {
	if strings.Contains(err.Error(), "sql: database is closed") { // database/sql exports no value for it
		return true
	}
	if state := sqlState(err); len(state) == 5 {
		switch state {
		case "0A000", "26000", "42P05": // prepared statements: the table was altered, or a pooler has changed the connection
			return false
		}
		switch state[:2] {
		case "08", // connection exception
			"25", // invalid transaction state: read_only_sql_transaction after a fail-over
			"40", // transaction rollback
			"53", // insufficient resources
			"55", // object not in prerequisite state: lock_not_available
			"57", // operator intervention: shutdown, cannot_connect_now, query_canceled
			"58", // system error
			"XX": // internal error
			return false
		}
		return true
	}
	if n := mysqlNumber(err); n != 0 {
		return permanentMySQL[n]
	}
	switch sqliteCode(err) & 0xff { // https://sqlite.org/rescode.html
	case 1, // ERROR: no such table, syntax
		3,  // PERM
		8,  // READONLY
		12, // NOTFOUND
		14, // CANTOPEN
		19, // CONSTRAINT
		20, // MISMATCH
		21, // MISUSE
		23, // AUTH
		25, // RANGE
		26: // NOTADB
		return true
	}
	return false
}

// https://mariadb.com/kb/en/mariadb-error-code-reference/; the numbers are MySQL's as well.
var permanentMySQL = map[int]bool{
	1044: true, 1045: true, 1142: true, 1143: true, 1227: true, 1370: true, 1698: true, // access denied
	1046: true, 1049: true, 1051: true, 1054: true, 1109: true, 1146: true, // no such database, table or column
	1062: true, 1048: true, 1264: true, 1265: true, 1292: true, 1364: true, 1366: true, 1406: true, 4025: true, 3819: true, // the value
	1064: true, 1149: true, 1235: true, 1305: true, 1347: true, // the statement
}

// noTable reports whether err says that the table does not exist.
func noTable(err error) bool {
	return sqlState(err) == "42P01" || mysqlNumber(err) == 1146 ||
		sqliteCode(err) == 1 && strings.Contains(err.Error(), "no such table")
}

// hint says what to do about err, for the mistakes that cost most.
func hint(err error, table string) string {
	switch {
	case noTable(err):
		return fmt.Sprintf(" (create %s with CreateTable, from DDL or by locker init)", table)
	case mysqlNumber(err) == 1048: // the statement makes it so
		return " (is autocommit off in this pool? Then nothing would ever be committed: remove autocommit=0 from the DSN)"
	}
	return ""
}

// permanentError marks an error that waiting does not cure. A Session stops waiting at any error that has Permanent() true.
type permanentError struct{ error }

func (permanentError) Permanent() bool { return true }
func (e permanentError) Unwrap() error { return e.error }

func isPermanent(err error) bool {
	var p interface{ Permanent() bool }
	return errors.Is(err, ErrInvalid) || errors.Is(err, ErrClosed) || errors.Is(err, ErrNoRow) || errors.As(err, &p) && p.Permanent()
}

// bare is the text of err without the prefix that the error it goes into has already.
func bare(err error) string { return strings.TrimPrefix(err.Error(), "locker: ") }

// isVerdict reports whether err says, for certain, that a grant is no longer its owner's.
func isVerdict(err error) bool {
	return errors.Is(err, ErrNotHeld) || errors.Is(err, ErrNotOwner) || errors.Is(err, ErrNoRow)
}
