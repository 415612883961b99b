/* Preloaded into a process, writes down in order all that it asks of the files below a folder: what is written where,
 * what is synced, which names come and go. RECORDER_FOLDER names the folder, RECORDER_LOG the log. A record is a line,
 * for W followed by so many bytes. Calls go on to libc; what fails is not noted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 4096
static const char *folder;
static int log_file = -1;
static unsigned long inode_of[FILES]; /* of descriptors below the folder; 0 for others */
static char synchronous[FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    folder = getenv("RECORDER_FOLDER");
    const char *path = getenv("RECORDER_LOG");
    if (folder && path)
        log_file = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int ours(const char *path) {
    if (log_file < 0 || !path || strncmp(path, folder, strlen(folder)))
        return 0;
    return path[strlen(folder)] == '/' || !path[strlen(folder)];
}

static unsigned long known(int file) {
    return log_file >= 0 && file >= 0 && file < FILES ? inode_of[file] : 0;
}

static void put(const void *data, size_t size) {
    while (size) {
        ssize_t done = REAL(write)(log_file, data, size);
        if (done <= 0)
            _exit(97);
        data = (const char *)data + done;
        size -= done;
    }
}

static void say(const char *format, ...) {
    char line[8192];
    va_list rest;
    va_start(rest, format);
    int size = vsnprintf(line, sizeof line, format, rest);
    va_end(rest);
    put(line, size);
}

static unsigned long inode(const char *path) {
    struct stat about;
    return lstat(path, &about) ? 0 : about.st_ino;
}

/* Calls are made under the lock, so the log has them in the order in which the kernel had them. */
static void note_write(int file, const struct iovec *parts, int count, off_t offset, ssize_t done) {
    say("W %lu %lld %zd\n", inode_of[file], (long long)offset, done);
    for (int n = 0; n < count && done > 0; n++) {
        size_t size = parts[n].iov_len < (size_t)done ? parts[n].iov_len : (size_t)done;
        put(parts[n].iov_base, size);
        done -= size;
    }
    if (synchronous[file])
        say("S %lu\n", inode_of[file]);
}

static int opened(const char *path, int flags, mode_t mode) {
    if (!ours(path))
        return REAL(open)(path, flags, mode);
    pthread_mutex_lock(&lock);
    unsigned long before = inode(path);
    int file = REAL(open)(path, flags, mode);
    if (file >= 0 && file < FILES) {
        struct stat about;
        fstat(file, &about);
        inode_of[file] = about.st_ino;
        synchronous[file] = (flags & O_DSYNC) != 0;
        if (!before)
            say("C %lu %s\n", inode_of[file], path);
        else if ((flags & O_TRUNC) && S_ISREG(about.st_mode))
            say("T %lu 0\n", inode_of[file]);
    }
    pthread_mutex_unlock(&lock);
    return file;
}

#define MODE                                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                               \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

int open(const char *path, int flags, ...) { MODE return opened(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) {
    MODE if (path[0] == '/') return opened(path, flags, mode);
    return REAL(openat)(at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
    MODE if (path[0] == '/') return opened(path, flags, mode);
    return REAL(openat)(at, path, flags, mode);
}

int close(int file) {
    if (file == log_file && log_file >= 0)
        return 0;
    if (file >= 0 && file < FILES)
        inode_of[file] = 0;
    return REAL(close)(file);
}

#define NOTED(call, file, parts, count, offset)                                                                        \
    if (!known(file))                                                                                                  \
        return call;                                                                                                   \
    pthread_mutex_lock(&lock);                                                                                         \
    off_t at = (offset);                                                                                               \
    ssize_t done = call;                                                                                               \
    int error = errno;                                                                                                 \
    if (done > 0)                                                                                                      \
        note_write(file, parts, count, at, done);                                                                      \
    pthread_mutex_unlock(&lock);                                                                                       \
    errno = error;                                                                                                     \
    return done;

ssize_t write(int file, const void *data, size_t size) {
    struct iovec part = {(void *)data, size};
    NOTED(REAL(write)(file, data, size), file, &part, 1, lseek(file, 0, SEEK_CUR))
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    NOTED(REAL(writev)(file, parts, count), file, parts, count, lseek(file, 0, SEEK_CUR))
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) {
    struct iovec part = {(void *)data, size};
    NOTED(REAL(pwrite)(file, data, size, offset), file, &part, 1, offset)
}
ssize_t pwrite64(int file, const void *data, size_t size, off_t offset) { return pwrite(file, data, size, offset); }
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset) {
    NOTED(REAL(pwritev)(file, parts, count, offset), file, parts, count, offset)
}
ssize_t pwritev64(int file, const struct iovec *parts, int count, off_t offset) {
    return pwritev(file, parts, count, offset);
}
ssize_t pwritev2(int file, const struct iovec *parts, int count, off_t offset, int flags) {
    NOTED(REAL(pwritev2)(file, parts, count, offset, flags), file, parts, count, offset)
}
ssize_t pwritev64v2(int file, const struct iovec *parts, int count, off_t offset, int flags) {
    return pwritev2(file, parts, count, offset, flags);
}

#define SIMPLE(call, when, ...)                                                                                        \
    pthread_mutex_lock(&lock);                                                                                         \
    int done = call;                                                                                                   \
    int error = errno;                                                                                                 \
    if (done == 0 && (when))                                                                                           \
        say(__VA_ARGS__);                                                                                              \
    pthread_mutex_unlock(&lock);                                                                                       \
    errno = error;                                                                                                     \
    return done;

int fsync(int file) { SIMPLE(REAL(fsync)(file), known(file), "S %lu\n", known(file)) }
int fdatasync(int file) { SIMPLE(REAL(fdatasync)(file), known(file), "S %lu\n", known(file)) }
int ftruncate(int file, off_t size) {
    SIMPLE(REAL(ftruncate)(file, size), known(file), "T %lu %lld\n", known(file), (long long)size)
}
int ftruncate64(int file, off_t size) { return ftruncate(file, size); }
int truncate(const char *path, off_t size) {
    SIMPLE(REAL(truncate)(path, size), ours(path), "T %lu %lld\n", inode(path), (long long)size)
}
int truncate64(const char *path, off_t size) { return truncate(path, size); }
int posix_fallocate(int file, off_t offset, off_t size) {
    SIMPLE(REAL(posix_fallocate)(file, offset, size), known(file), "A %lu %lld\n", known(file),
           (long long)(offset + size))
}
int posix_fallocate64(int file, off_t offset, off_t size) { return posix_fallocate(file, offset, size); }
int rename(const char *from, const char *to) {
    SIMPLE(REAL(rename)(from, to), ours(from), "R %s\t%s\n", from, to)
}
int unlink(const char *path) { SIMPLE(REAL(unlink)(path), ours(path), "U %s\n", path) }
int mkdir(const char *path, mode_t mode) { SIMPLE(REAL(mkdir)(path, mode), ours(path), "M %lu %s\n", inode(path), path) }
