//! Errors and obstacles of managing a process's memory, as reported to the administrator.

use std::fmt;
use std::io;

use rustix::process::Pid;

use super::MappingLocation;

/// Error of inspecting a process, or refusal of it.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// There is no such process.
    #[error("there is no process {pid}: is the PID from another namespace (a container), or has the process ended?")]
    NoSuchProcess {
        /// The PID, as given.
        pid: Pid,
    },
    /// The process has ended, or is exiting.
    #[error("process {pid} has ended")]
    Ended {
        /// The process.
        pid: Pid,
    },
    /// The process is a kernel thread, which has no memory of its own.
    #[error("process {pid} is a kernel thread, which has no memory of its own: give the PID of the VM's QEMU")]
    KernelThread {
        /// The PID, as given.
        pid: Pid,
    },
    /// The kernel denies access to the process.
    #[error(
        "process {pid}: no permission to {tried}: run as root, with CAP_SYS_PTRACE, or as the same user as a process that \
        is dumpable"
    )]
    PermissionDenied {
        /// The process.
        pid: Pid,
        /// The step that was denied.
        tried: &'static str,
    },
    /// A file of the process in /proc could not be read.
    #[error("process {pid}: could not {tried}: {error}")]
    Unreadable {
        /// The process.
        pid: Pid,
        /// The step that failed.
        tried: &'static str,
        /// The error.
        error: io::Error,
    },
    /// The memory cannot be managed in its present form. Lists all obstacles.
    #[error("process {pid} ({name}): its memory cannot be managed:{}", Listed(.obstacles))]
    Obstacles {
        /// The process.
        pid: Pid,
        /// The name of the process.
        name: String,
        /// The obstacles, at least one.
        obstacles: Vec<Obstacle>,
    },
}

/// Formats the obstacles, one per line.
struct Listed<'a>(&'a [Obstacle]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|obstacle| write!(f, "\n- {obstacle}"))
    }
}

/// An obstacle to managing memory: what was found, where, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The kernel has no userfaultfd, or denies it to this process.
    #[error(
        "Linux {kernel} provides no userfaultfd: {error}: this requires a kernel built with CONFIG_USERFAULTFD, and no \
        seccomp filter around Larder that forbids it"
    )]
    NoUserfaultfd {
        /// The running kernel's version.
        kernel: String,
        /// Error of userfaultfd(2).
        error: io::Error,
    },
    /// The kernel's userfaultfd lacks features.
    #[error("the userfaultfd of Linux {kernel} lacks {missing}: Linux 5.19 or later on x86_64 or arm64 is required")]
    KernelLacks {
        /// The running kernel's version.
        kernel: String,
        /// Names of the features, separated by commas.
        missing: String,
    },
    /// The page size is not 4 KiB.
    #[error("this kernel has pages of {bytes} bytes: a kernel with pages of 4096 bytes is required")]
    PageSize {
        /// The kernel's page size, in bytes.
        bytes: u64,
    },
    /// A setting allows huge pages in shared memory.
    #[error(
        "shared memory may be in huge pages ({path} is '{mode}'), of which no part can be removed safely: write \
        'never' to that file, and restart the VM"
    )]
    HugePagesAllowed {
        /// The file of the setting.
        path: String,
        /// The value of the setting.
        mode: String,
    },
    /// The file system that contains the memory's file allows huge pages.
    #[error("its memory at {:#x} ({name}, {}) may be in huge pages, of which no part can be removed safely: its tmpfs {mount_point} is \
        mounted with huge={mode}; mount that with huge=never, and restart the VM", .location.address, Size(.location.bytes))]
    HugePagesAllowedByMount {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
        /// Mount point of the file system.
        mount_point: String,
        /// The value of the mount option.
        mode: String,
    },
    /// Some of the memory is in huge pages.
    #[error("{} of its memory at {:#x} ({name}, {}) are in huge pages, of which no part can be removed safely: restart the \
        VM, which then gets no huge pages", Size(*.bytes), .location.address, Size(.location.bytes))]
    HugePagesInUse {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
        /// Bytes in huge pages.
        bytes: u64,
    },
    /// The guest's memory is private.
    #[error("its memory is private, {} at {:#x}{}: it must be shared, so start QEMU with -object \
        memory-backend-memfd,id=m,size=SIZE,share=on -machine TYPE,memory-backend=m (SIZE as with -m), or set in \
        libvirt's domain <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>",
        Size(.location.bytes), .location.address, InBrackets(.name))]
    Private {
        /// Location of the largest private mapping.
        location: MappingLocation,
        /// Name of its file, or empty.
        name: String,
    },
    /// No memory is large enough.
    #[error("it has no shared memory of {} or more in a memfd or a file of tmpfs, nor private memory that could be a \
        guest's: is this the process that runs the VM?", Size(*.bytes_min))]
    NoMemory {
        /// Minimum size, in bytes.
        bytes_min: u64,
    },
    /// The memory's file is on a disk or in persistent memory.
    #[error("its memory, {} at {:#x}, is the file {name} of a file system that is not tmpfs: evicted pages \
        would be lost from the file, so put it into tmpfs (mem-path=/dev/shm/NAME), or use memory-backend-memfd",
        Size(.location.bytes), .location.address)]
    OnDisk {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
    },
    /// The memory is not known to be guest RAM, and other programs may use it.
    #[error("its memory, {} at {:#x} ({name}), is not among the guest's RAM in QEMU's command line (-machine \
        memory-backend, -numa memdev, pc-dimm, virtio-mem): other programs may map it (ivshmem), and would read zeros where \
        pages are evicted", Size(.location.bytes), .location.address)]
    NotRam {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
    },
    /// The memory is in hugetlbfs.
    #[error("its memory, {} at {:#x} ({name}), is in huge pages of hugetlbfs, which cannot be evicted one by one: start \
        QEMU without hugetlb=on (memory-backend-memfd), mem-path on hugetlbfs, or libvirt's <hugepages/>; transparent \
        huge pages can be used instead", Size(.location.bytes), .location.address)]
    Hugetlbfs {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
    },
    /// The process has mapped the same pages twice, and accesses through one mapping would not be reported.
    #[error("its memory at {:#x} ({name}, {}) is mapped a second time at {second_address:#x} ({permissions}), where accesses to it \
        would not be detected: map each part of memory only once", .location.address, Size(.location.bytes))]
    MappedTwice {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
        /// Address of the other mapping.
        second_address: u64,
        /// Permissions of the other mapping, as in `rw-s`.
        permissions: String,
    },
    /// Another process has the memory mapped.
    #[error("its memory at {:#x} ({name}, {}) is also mapped by process {pid} ({process_name}), which would read zeros where pages \
        are evicted: end that process (a vhost-user device, such as virtiofsd), and use a device within QEMU",
        .location.address, Size(.location.bytes))]
    MappedByOther {
        /// Location of the memory in the target.
        location: MappingLocation,
        /// Name of the file.
        name: String,
        /// The other process.
        pid: Pid,
        /// Name of the other process.
        process_name: String,
    },
    /// The memory's file cannot be opened.
    #[error("its memory at {:#x} ({name}, {}) cannot be opened: {error}: run as root, or let Larder's user write to the \
        file", .location.address, Size(.location.bytes))]
    NotOpened {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
        /// Error of open(2).
        error: io::Error,
    },
    /// The file ends within the mapping.
    #[error("its memory at {:#x} ({name}, {}) extends past the end of its file, which has {file_bytes} bytes: make the \
        file as long as size= specifies", .location.address, Size(.location.bytes))]
    PastEnd {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
        /// Length of the file, in bytes.
        file_bytes: u64,
    },
    /// A seal forbids removing pages from the memfd.
    #[error("its memory at {:#x} ({name}, {}) is sealed with {seals}, so that no page can be removed from it: start the \
        process without that seal", .location.address, Size(.location.bytes))]
    Sealed {
        /// Location of the memory.
        location: MappingLocation,
        /// Name of the file.
        name: String,
        /// Names of the seals.
        seals: &'static str,
    },
    /// A device, or the processor, accesses memory without page faults.
    #[error("descriptor {descriptor} is {path}: {device}")]
    Device {
        /// Descriptor number in the target.
        descriptor: i32,
        /// Target of the descriptor.
        path: String,
        /// Kind of the device.
        device: DmaDevice,
    },
    /// An io_uring has registered buffers, and writes to their pages.
    #[error(
        "descriptor {descriptor} is an io_uring with {count} registered buffers, whose pages the kernel pins and \
        writes to, even after they were evicted: unregister them (QEMU itself registers none)"
    )]
    RegisteredBuffers {
        /// Descriptor number in the target.
        descriptor: i32,
        /// Number of buffers.
        count: u64,
    },
    /// Memory is locked.
    #[error("{} of it are locked in memory (VmLck): start QEMU without -overcommit mem-lock=on, or remove <locked/> from \
        libvirt's <memoryBacking>; an assigned device (VFIO) is counted there, too", Size(*.bytes))]
    Locked {
        /// Bytes that are locked.
        bytes: u64,
    },
    /// Memory is pinned for a device or the kernel.
    #[error("{} of it are pinned (VmPin) for a device or an io_uring, which writes to its pages even after they were \
        evicted: remove that device, or the registered buffers", Size(*.bytes))]
    Pinned {
        /// Bytes that are pinned.
        bytes: u64,
    },
    /// Another process traces a thread.
    #[error("process {tracer_pid} ({tracer_name}) traces its thread {tid}: detach that (a debugger, strace) first")]
    Traced {
        /// The first traced thread.
        tid: Pid,
        /// Name of the tracer.
        tracer_name: String,
        /// PID of the tracer.
        tracer_pid: i32,
    },
    /// The process has a userfaultfd of its own, or of another pager.
    #[error(
        "descriptor {descriptor} is a userfaultfd: another program handles its page faults (QEMU itself in a post-copy \
        migration or a background snapshot, or another pager): wait until that has ended, or detach it"
    )]
    Userfaultfd {
        /// Descriptor number in the target.
        descriptor: i32,
    },
}

impl Obstacle {
    /// Returns true if the mapping may have disappeared after the list of mappings was read.
    pub(super) fn may_have_vanished(&self) -> bool {
        matches!(self, Self::NotOpened { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }

    /// Returns true if this obstacle concerns the successor of a pager, too. All others concern only a first attach:
    /// the successor finds the memory managed, and the guest waits for it. Memory that cannot be opened stops a
    /// successor only if it was managed, which the state shows ([`crate::attach::AttachCandidate::open`]).
    pub(super) fn forbids_successor(&self) -> bool {
        matches!(
            self,
            Self::NoUserfaultfd { .. }
                | Self::KernelLacks { .. }
                | Self::PageSize { .. }
                | Self::NoMemory { .. }
                | Self::Private { .. }
                | Self::OnDisk { .. }
        )
    }

    /// Returns the location of the memory that the obstacle concerns, if it concerns one.
    pub fn location(&self) -> Option<MappingLocation> {
        match self {
            Self::Private { location: place, .. }
            | Self::OnDisk { location: place, .. }
            | Self::NotRam { location: place, .. }
            | Self::Hugetlbfs { location: place, .. }
            | Self::HugePagesAllowedByMount { location: place, .. }
            | Self::HugePagesInUse { location: place, .. }
            | Self::MappedTwice { location: place, .. }
            | Self::MappedByOther { location: place, .. }
            | Self::NotOpened { location: place, .. }
            | Self::PastEnd { location: place, .. }
            | Self::Sealed { location: place, .. } => Some(*place),
            _ => None,
        }
    }
}

/// Device that accesses memory without page faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DmaDevice {
    /// A device of the host that is assigned to the guest.
    Vfio,
    /// A vDPA network or block device of the host.
    Vdpa,
    /// RDMA, for migration or storage.
    Rdma,
    /// Buffers of the host's graphics.
    Udmabuf,
    /// Memory encrypted by AMD SEV.
    Sev,
    /// Memory that only the guest can access.
    GuestMemfd,
}

impl fmt::Display for DmaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vfio => {
                "a device assigned to the guest can access all of its memory: remove the device (vfio-pci, libvirt's \
                 <hostdev>), and use an emulated one"
            }
            Self::Vdpa => "a vDPA device can access all of the guest's memory: use a virtio device of QEMU itself",
            Self::Rdma => "RDMA accesses memory that was registered with it: use TCP instead",
            Self::Udmabuf => "it pins guest memory for graphics: use virtio-gpu without blob=on",
            Self::Sev => "the memory of an encrypted guest (AMD SEV) is pinned: start the guest without sev-guest",
            Self::GuestMemfd => {
                "a confidential guest has private memory there (TDX, SEV-SNP), which cannot be read: start the guest \
                 without confidential memory"
            }
        })
    }
}

/// Formats bytes exactly, in the largest unit that divides them.
pub(super) struct Size(pub(super) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        let exact = |(unit, _): &&(u64, &str)| self.0 >= *unit && self.0.is_multiple_of(*unit);
        match units.iter().find(exact) {
            Some((unit, name)) => write!(f, "{} {name}", self.0 / unit),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// Formats the name of a file in brackets, or nothing if it is empty.
struct InBrackets<'a>(&'a str);

impl fmt::Display for InBrackets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact() {
        let shown = |bytes| Size(bytes).to_string();
        assert_eq!(shown(64 << 20), "64 MiB");
        assert_eq!(shown((3 << 30) + (1 << 20)), "3073 MiB");
        assert_eq!(shown(4097), "4097 bytes");
        assert_eq!(shown(0), "0 bytes");
    }
}
