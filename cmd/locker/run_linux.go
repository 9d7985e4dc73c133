package main

import "syscall"

// dieWithParent: if locker is killed with KILL, the command gets TERM. The kernel sends it when the thread that started the command
// ends, so that must be one that lives as long as locker does.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} }
