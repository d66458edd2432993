/* Binds the servers of Ray and torch to one interface.
 *
 * Both listen on all interfaces and have no setting for it. This library replaces `bind` in their code: a wildcard
 * address becomes that of the cluster's interface. Calls from any other code pass unchanged.
 *
 *   Ray's binaries and worker processes:  LD_PRELOAD, with the address in ROLLART_BIND
 *   a process that runs already:          rollart_bind_to(address), which also redirects the calls of loaded libraries
 *
 * A server that cannot be bound to the interface fails: it never falls back to the wildcard. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Parts of the paths of libraries and programs whose servers are redirected. */
static const char *const SERVERS[] = {"/ray/_raylet", "/ray/core/src/ray/", "/torch/lib/"};

static struct in_addr cluster4;
static struct in6_addr cluster6;
static int family; /* of the cluster's address; 0 = nothing is redirected */

static int set_address(const char *address) {
  if (inet_pton(AF_INET, address, &cluster4) == 1) family = AF_INET;
  else if (inet_pton(AF_INET6, address, &cluster6) == 1) family = AF_INET6;
  else return -1;
  return 0;
}

static int is_server(const char *path) {
  for (size_t i = 0; path && i < sizeof SERVERS / sizeof *SERVERS; i++)
    if (strstr(path, SERVERS[i])) return 1;
  return 0;
}

static int bind_here(int fd, const struct sockaddr *address, socklen_t length) {
  if (family && address && address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
    struct sockaddr_in here = *(const struct sockaddr_in *)address;
    if (here.sin_addr.s_addr == htonl(INADDR_ANY) && family == AF_INET) here.sin_addr = cluster4;
    return syscall(SYS_bind, fd, &here, sizeof here);
  }
  if (family && address && address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
    struct sockaddr_in6 here = *(const struct sockaddr_in6 *)address;
    if (IN6_IS_ADDR_UNSPECIFIED(&here.sin6_addr)) {
      if (family == AF_INET6) {
        here.sin6_addr = cluster6;
      } else { /* ::ffff:a.b.c.d, which a socket for both families binds to as to a.b.c.d */
        memset(&here.sin6_addr, 0, sizeof here.sin6_addr);
        here.sin6_addr.s6_addr[10] = here.sin6_addr.s6_addr[11] = 0xff;
        memcpy(&here.sin6_addr.s6_addr[12], &cluster4, sizeof cluster4);
      }
    }
    return syscall(SYS_bind, fd, &here, sizeof here);
  }
  return syscall(SYS_bind, fd, address, length);
}

/* Found before that of libc when this library is preloaded. */
int bind(int fd, const struct sockaddr *address, socklen_t length) {
  Dl_info caller;
  if (family && dladdr(__builtin_return_address(0), &caller) && is_server(caller.dli_fname))
    return bind_here(fd, address, length);
  return syscall(SYS_bind, fd, address, length);
}

/* --- a process that runs already ---------------------------------------------------------------------------------- */

static int redirect(uintptr_t slot) {
  uintptr_t page = slot & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
  if (mprotect((void *)page, slot - page + sizeof slot, PROT_READ | PROT_WRITE)) return 0;
  *(uintptr_t *)slot = (uintptr_t)bind_here;
  return 1;
}

static int redirect_all(const ElfW(Rela) *entry, size_t bytes, const ElfW(Sym) *symbols, const char *names,
                        uintptr_t base) {
  int found = 0;
  for (size_t i = 0; entry && i < bytes / sizeof *entry; i++) {
    const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(entry[i].r_info)];
    if (ELF64_R_SYM(entry[i].r_info) && !strcmp(names + symbol->st_name, "bind"))
      found += redirect(base + entry[i].r_offset);
  }
  return found;
}

static int visit(struct dl_phdr_info *library, size_t size, void *found) {
  (void)size;
  if (!is_server(library->dlpi_name)) return 0;
  const ElfW(Rela) *calls = NULL, *others = NULL;
  const ElfW(Sym) *symbols = NULL;
  const char *names = NULL;
  size_t calls_bytes = 0, others_bytes = 0;
  for (int i = 0; i < library->dlpi_phnum; i++) {
    if (library->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    for (const ElfW(Dyn) *entry = (void *)(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr); entry->d_tag; entry++) {
      /* The loader of glibc has made these addresses absolute, others have not. */
      uintptr_t base = entry->d_un.d_ptr < library->dlpi_addr ? library->dlpi_addr : 0;
      void *where = (void *)(base + entry->d_un.d_ptr);
      if (entry->d_tag == DT_JMPREL) calls = where;
      if (entry->d_tag == DT_PLTRELSZ) calls_bytes = entry->d_un.d_val;
      if (entry->d_tag == DT_RELA) others = where;
      if (entry->d_tag == DT_RELASZ) others_bytes = entry->d_un.d_val;
      if (entry->d_tag == DT_SYMTAB) symbols = where;
      if (entry->d_tag == DT_STRTAB) names = where;
    }
  }
  if (symbols && names) {
    *(int *)found += redirect_all(calls, calls_bytes, symbols, names, library->dlpi_addr);
    *(int *)found += redirect_all(others, others_bytes, symbols, names, library->dlpi_addr);
  }
  return 0;
}

/* The number of redirected calls in the libraries that are loaded; -1 for an invalid address. */
int rollart_bind_to(const char *address) {
  int found = 0;
  if (set_address(address)) return -1;
  dl_iterate_phdr(visit, &found);
  return found;
}

__attribute__((constructor)) static void start(void) {
  const char *address = getenv("ROLLART_BIND");
  if (address && *address && set_address(address)) abort(); /* never open to all by a mistake */
}
