/* Storage that fails: calls of libc on chosen paths answer with an error, late, or by half.

   FAULT_RULES: rules separated by ';', each OPERATION:PART_OF_PATH:ACTION:FIRST:COUNT
     OPERATION  open read write fsync fsyncdir rename
     ACTION     the number of an errno, `short` (half of the bytes), or `slow` and milliseconds (slow5000)
     FIRST      how many calls of this process go well before; COUNT: how many fail then, 0 for all
   FAULT_LOG: a file that gets a line for each call that was disturbed.

   Both are read at each call, so that a forked rank obeys its own environment. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define MAX_RULES 8

static int calls[MAX_RULES], owner;               /* per process: a fork begins to count anew */

static void note(const char *operation, const char *path, const char *action) {
    const char *log = getenv("FAULT_LOG");
    char line[1500];
    if (!log) return;
    int length = snprintf(line, sizeof line, "%d %s %s %s\n", getpid(), operation, action, path);
    int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    syscall(SYS_write, file, line, length);
    syscall(SYS_close, file);
}

/* 0: go on. 1: fail with errno. 2: do half of it. */
static int disturb(const char *operation, const char *path) {
    const char *rules = getenv("FAULT_RULES");
    int before = errno, number = 0;
    if (!rules || !*rules || !path) return 0;
    if (owner != getpid()) { memset(calls, 0, sizeof calls); owner = getpid(); }
    for (const char *rule = rules; rule && *rule && number < MAX_RULES; number++) {
        char wanted[16] = "", part[256] = "", action[32] = "";
        int first = 0, count = 0;
        sscanf(rule, "%15[^:]:%255[^:]:%31[^:]:%d:%d", wanted, part, action, &first, &count);
        rule = strchr(rule, ';');
        if (rule) rule++;
        if (strcmp(wanted, operation) || !strstr(path, part)) continue;
        int call = __sync_fetch_and_add(&calls[number], 1);
        if (call < first || (count && call >= first + count)) continue;
        note(operation, path, action);
        if (!strncmp(action, "slow", 4)) {
            long ms = atol(action + 4);
            struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
            nanosleep(&pause, NULL);
            errno = before;
            return 0;
        }
        if (!strcmp(action, "short")) return 2;
        errno = atoi(action);
        return 1;
    }
    errno = before;
    return 0;
}

static int disturb_fd(const char *operation, int fd) {
    char link[64], path[1024];
    const char *rules = getenv("FAULT_RULES");
    if (!rules || !*rules || !strstr(rules, operation)) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length <= 0 || path[0] != '/') return 0;
    path[length] = 0;
    return disturb(operation, path);
}

#define OPENED(call) { \
    mode_t mode = 0; \
    va_list rest; \
    va_start(rest, flags); \
    if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t); \
    va_end(rest); \
    if (disturb("open", path) == 1) return -1; \
    return call; }

int open(const char *path, int flags, ...) OPENED(REAL(open)(path, flags, mode))
int open64(const char *path, int flags, ...) OPENED(REAL(open64)(path, flags, mode))
int openat(int at, const char *path, int flags, ...) OPENED(REAL(openat)(at, path, flags, mode))
int openat64(int at, const char *path, int flags, ...) OPENED(REAL(openat64)(at, path, flags, mode))

#define HALF(n) ((n) > 1 ? (n) / 2 : (n))
#define MOVED(operation, n, whole, half) { \
    int fault = disturb_fd(operation, fd); \
    if (fault == 1) return -1; \
    return fault == 2 && (n) > 1 ? half : whole; }

ssize_t read(int fd, void *to, size_t n) MOVED("read", n, REAL(read)(fd, to, n), REAL(read)(fd, to, HALF(n)))
ssize_t pread(int fd, void *to, size_t n, off_t at)
    MOVED("read", n, REAL(pread)(fd, to, n, at), REAL(pread)(fd, to, HALF(n), at))
ssize_t pread64(int fd, void *to, size_t n, off64_t at)
    MOVED("read", n, REAL(pread64)(fd, to, n, at), REAL(pread64)(fd, to, HALF(n), at))
ssize_t write(int fd, const void *from, size_t n)
    MOVED("write", n, REAL(write)(fd, from, n), REAL(write)(fd, from, HALF(n)))
ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at)
    MOVED("write", n, REAL(pwrite64)(fd, from, n, at), REAL(pwrite64)(fd, from, HALF(n), at))
ssize_t writev(int fd, const struct iovec *parts, int n)
    MOVED("write", n, REAL(writev)(fd, parts, n), REAL(writev)(fd, parts, HALF(n)))

int fsync(int fd) {
    struct stat status;
    int folder = !fstat(fd, &status) && S_ISDIR(status.st_mode);
    if (disturb_fd(folder ? "fsyncdir" : "fsync", fd) == 1) return -1;
    return REAL(fsync)(fd);
}

int rename(const char *from, const char *to) {
    if (disturb("rename", from) == 1) return -1;
    return REAL(rename)(from, to);
}
