/* Calls of the system of which the n-th fails: preloaded (LD_PRELOAD) before libc by tests/simulators/failing_calls.py.
 *
 * Counted are calls on files whose path begins with a prefix, or on sockets where that is "socket:", and the start of
 * threads where it is "thread:". The error 0 cuts a transfer short instead: it moves half of its bytes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char prefix[4096];
static int failing_error, is_armed, fails_on;
static atomic_long number, num_calls;

void fail_calls(const char *path, long nth, int error, int forever) {
    snprintf(prefix, sizeof prefix, "%s", path);
    failing_error = error;
    fails_on = forever;
    number = nth;
    num_calls = 0;
    is_armed = 1;
}

/* Returns how many calls there were. */
long stop_failing(void) {
    is_armed = 0;
    return num_calls;
}

__attribute__((constructor)) static void arm_by_environment(void) {
    const char *path = getenv("FAILING_PATH");
    if (path)
        fail_calls(path, atol(getenv("FAILING_NUMBER")), atoi(getenv("FAILING_ERROR")), atoi(getenv("FAILING_FOREVER")));
}

static int is_counted(const char *path) { return strncmp(path, prefix, strlen(prefix)) == 0; }

static int is_open_counted(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_counted(path);
}

static int is_name_counted(int folder, const char *name) {
    if (name[0] == '/')
        return is_counted(name);
    return folder != AT_FDCWD && is_open_counted(folder);
}

/* Whether this call is to fail; counts it. */
static int is_failing(void) {
    long call = ++num_calls;
    return call == number || (fails_on && call > number);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_IF(counted, result)                            \
    do {                                                    \
        if (is_armed && (counted) && is_failing() && failing_error) { \
            errno = failing_error;                          \
            return result;                                  \
        }                                                   \
    } while (0)

/* As FAIL_IF for a transfer, whose `size` is halved where the error is 0. */
#define FAIL_OR_CUT(counted, size)                          \
    do {                                                    \
        if (is_armed && (counted) && is_failing()) {        \
            if (failing_error) {                            \
                errno = failing_error;                      \
                return -1;                                  \
            }                                               \
            size = (size + 1) / 2;                          \
        }                                                   \
    } while (0)

#define OPEN(name)                                                          \
    int name(const char *path, int flags, ...) {                            \
        va_list arguments;                                                  \
        va_start(arguments, flags);                                         \
        mode_t mode = va_arg(arguments, mode_t);                            \
        va_end(arguments);                                                  \
        FAIL_IF(is_name_counted(AT_FDCWD, path), -1);                       \
        return REAL(name)(path, flags, mode);                               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                        \
    int name(int folder, const char *path, int flags, ...) {                \
        va_list arguments;                                                  \
        va_start(arguments, flags);                                         \
        mode_t mode = va_arg(arguments, mode_t);                            \
        va_end(arguments);                                                  \
        FAIL_IF(is_name_counted(folder, path), -1);                         \
        return REAL(name)(folder, path, flags, mode);                       \
    }
OPENAT(openat)
OPENAT(openat64)

#define TRANSFER(name, type)                                                \
    ssize_t name(int file, type data, size_t size) {                        \
        FAIL_OR_CUT(is_open_counted(file), size);                           \
        return REAL(name)(file, data, size);                                \
    }
TRANSFER(read, void *)
TRANSFER(write, const void *)

#define TRANSFER_AT(name, type)                                             \
    ssize_t name(int file, type data, size_t size, off64_t offset) {        \
        FAIL_OR_CUT(is_open_counted(file), size);                           \
        return REAL(name)(file, data, size, offset);                        \
    }
TRANSFER_AT(pread64, void *)
TRANSFER_AT(pwrite64, const void *)
TRANSFER_AT(pread, void *)
TRANSFER_AT(pwrite, const void *)

/* Cut to the half of the first part. */
#define TRANSFER_PARTS(name)                                                \
    ssize_t name(int file, const struct iovec *parts, int count, off64_t offset) { \
        struct iovec first = parts[0];                                      \
        size_t size = first.iov_len;                                        \
        FAIL_OR_CUT(is_open_counted(file), size);                           \
        if (size == first.iov_len)                                          \
            return REAL(name)(file, parts, count, offset);                  \
        first.iov_len = size;                                               \
        return REAL(name)(file, &first, 1, offset);                         \
    }
TRANSFER_PARTS(preadv)
TRANSFER_PARTS(pwritev)
TRANSFER_PARTS(preadv64)
TRANSFER_PARTS(pwritev64)

ssize_t send(int file, const void *data, size_t size, int flags) {
    FAIL_OR_CUT(is_open_counted(file), size);
    return REAL(send)(file, data, size, flags);
}

ssize_t recv(int file, void *data, size_t size, int flags) {
    FAIL_OR_CUT(is_open_counted(file), size);
    return REAL(recv)(file, data, size, flags);
}

/* its access attribute says that files are only written */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
int poll(struct pollfd *files, nfds_t count, int timeout) {
    FAIL_IF(count > 0 && is_open_counted(files[0].fd), -1);
    return REAL(poll)(files, count, timeout);
}

int socketpair(int domain, int type, int protocol, int files[2]) {
    FAIL_IF(is_counted("socket:"), -1);
    return REAL(socketpair)(domain, type, protocol, files);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    if (is_armed && is_counted("thread:") && is_failing())
        return failing_error;
    return REAL(pthread_create)(thread, attributes, run, argument);
}

#define ON_FILE(name, parameters, arguments, result)                        \
    int name parameters {                                                   \
        FAIL_IF(is_open_counted(file), result);                             \
        return REAL(name) arguments;                                        \
    }
/* no power fails, and waiting for a disk takes most of the time of a test */
#define FLUSH(name)                                                         \
    int name(int file) {                                                    \
        FAIL_IF(is_open_counted(file), -1);                                 \
        return 0;                                                           \
    }
FLUSH(fsync)
FLUSH(fdatasync)
ON_FILE(flock, (int file, int operation), (file, operation), -1)
ON_FILE(fchmod, (int file, mode_t mode), (file, mode), -1)
ON_FILE(ftruncate, (int file, off64_t size), (file, size), -1)
ON_FILE(ftruncate64, (int file, off64_t size), (file, size), -1)
ON_FILE(posix_fallocate, (int file, off64_t offset, off64_t size), (file, offset, size), failing_error)
ON_FILE(posix_fallocate64, (int file, off64_t offset, off64_t size), (file, offset, size), failing_error)
ON_FILE(fstat, (int file, struct stat *status), (file, status), -1)
ON_FILE(fstat64, (int file, struct stat64 *status), (file, status), -1)

#define ON_NAME(name, parameters, arguments)                                \
    int name parameters {                                                   \
        FAIL_IF(is_name_counted(AT_FDCWD, path), -1);                       \
        return REAL(name) arguments;                                        \
    }
ON_NAME(mkdir, (const char *path, mode_t mode), (path, mode))
ON_NAME(rmdir, (const char *path), (path))
ON_NAME(unlink, (const char *path), (path))
ON_NAME(chmod, (const char *path, mode_t mode), (path, mode))
ON_NAME(truncate64, (const char *path, off64_t size), (path, size))
ON_NAME(rename, (const char *path, const char *to), (path, to))
ON_NAME(stat, (const char *path, struct stat *status), (path, status))
ON_NAME(stat64, (const char *path, struct stat64 *status), (path, status))
ON_NAME(lstat, (const char *path, struct stat *status), (path, status))
ON_NAME(lstat64, (const char *path, struct stat64 *status), (path, status))

#define IN_FOLDER(name, parameters, arguments)                              \
    int name parameters {                                                   \
        FAIL_IF(is_name_counted(folder, path), -1);                         \
        return REAL(name) arguments;                                        \
    }
IN_FOLDER(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
IN_FOLDER(unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
IN_FOLDER(fstatat, (int folder, const char *path, struct stat *status, int flags), (folder, path, status, flags))
IN_FOLDER(fstatat64, (int folder, const char *path, struct stat64 *status, int flags), (folder, path, status, flags))
IN_FOLDER(renameat, (int folder, const char *path, int to_folder, const char *to), (folder, path, to_folder, to))
IN_FOLDER(renameat2, (int folder, const char *path, int to_folder, const char *to, unsigned flags),
          (folder, path, to_folder, to, flags))

DIR *opendir(const char *path) {
    FAIL_IF(is_name_counted(AT_FDCWD, path), NULL);
    return REAL(opendir)(path);
}

DIR *fdopendir(int file) {
    FAIL_IF(is_open_counted(file), NULL);
    return REAL(fdopendir)(file);
}

struct dirent64 *readdir64(DIR *folder) {
    FAIL_IF(is_open_counted(dirfd(folder)), NULL);
    return REAL(readdir64)(folder);
}
