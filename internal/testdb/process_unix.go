//go:build unix

package testdb

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

const canStart = true

// isolate gives cmd a process group of its own, out of reach of the terminal's Ctrl-C, and, if this process is root, account's
// rights ("": its own).
func isolate(cmd *exec.Cmd, account string) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if account == "" || os.Geteuid() != 0 {
		return nil
	}
	uid, gid, err := ids(account)
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return err
}

func chown(path, account string) error {
	if account == "" || os.Geteuid() != 0 {
		return nil
	}
	uid, gid, err := ids(account)
	if err != nil {
		return err
	}
	return os.Chown(path, uid, gid)
}

func ids(account string) (uid, gid int, err error) {
	u, err := user.Lookup(account)
	if err != nil {
		return 0, 0, fmt.Errorf("the server refuses root, and there is no account for it: %w", err)
	}
	if uid, err = strconv.Atoi(u.Uid); err != nil {
		return 0, 0, err
	}
	gid, err = strconv.Atoi(u.Gid)
	return uid, gid, err
}

func killGroup(pid int) { _ = syscall.Kill(-pid, syscall.SIGKILL) }
