//! Why the memory of a process cannot be managed, as the admin is told.

use std::fmt;
use std::io;

use rustix::process::Pid;

use super::Place;

/// Why a process was not examined, or not accepted.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// There is none.
    #[error("there is no process {pid}: is the PID of another namespace (a container's), or has it ended?")]
    NoSuchProcess {
        /// As asked for.
        pid: Pid,
    },
    /// It has ended, or is about to.
    #[error("process {pid} has ended")]
    Ended {
        /// The process.
        pid: Pid,
    },
    /// It has no memory of its own.
    #[error("process {pid} is a thread of the kernel, which has no memory of its own: give the PID of the VM's QEMU")]
    KernelThread {
        /// As asked for.
        pid: Pid,
    },
    /// The kernel does not let us look.
    #[error(
        "process {pid}: no right to {tried}: be root, or have CAP_SYS_PTRACE, or be the same user as a process that \
        may be dumped"
    )]
    NoRights {
        /// The process.
        pid: Pid,
        /// What was tried.
        tried: &'static str,
    },
    /// Something that the kernel tells of the process could not be read.
    #[error("process {pid}: could not {tried}: {error}")]
    Unreadable {
        /// The process.
        pid: Pid,
        /// What was tried.
        tried: &'static str,
        /// Why it failed.
        error: io::Error,
    },
    /// Its memory cannot be managed as it is: all that is in the way.
    #[error("process {pid} ({name}): its memory cannot be managed:{}", Listed(.obstacles))]
    Obstacles {
        /// The process.
        pid: Pid,
        /// What it calls itself.
        name: String,
        /// Never empty.
        obstacles: Vec<Obstacle>,
    },
}

/// One per line.
struct Listed<'a>(&'a [Obstacle]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|obstacle| write!(f, "\n- {obstacle}"))
    }
}

/// One thing that is in the way: what was found, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The kernel has no userfaultfd, or not for us.
    #[error(
        "Linux {kernel} gives no userfaultfd: {error}: it takes a kernel built with CONFIG_USERFAULTFD, and no \
        filter of system calls (seccomp) around Larder that forbids it"
    )]
    NoUserfaultfd {
        /// The version that runs.
        kernel: String,
        /// Of userfaultfd(2).
        error: io::Error,
    },
    /// The kernel's userfaultfd is too old.
    #[error("the userfaultfd of Linux {kernel} lacks {missing}: it takes Linux 5.19 or later, on x86_64 or arm64")]
    KernelLacks {
        /// The version that runs.
        kernel: String,
        /// The names of the features, with commas.
        missing: String,
    },
    /// Pages are not of 4 KiB.
    #[error("this kernel has pages of {bytes} bytes: it takes one with pages of 4096")]
    PageSize {
        /// Of the kernel.
        bytes: u64,
    },
    /// Shared memory may come in large pages.
    #[error(
        "shared memory may be in huge pages ({path} is '{mode}'), of which no part can be taken out safely: write \
        'never' to that file, and restart the VM"
    )]
    LargePages {
        /// Where it is set.
        path: String,
        /// To what.
        mode: String,
    },
    /// The file system that its memory is a file of may give it large pages.
    #[error("its memory at {:#x} ({name}, {}) may be in huge pages, of which no part can be taken out safely: its tmpfs {at} is \
        mounted with huge={mode}; mount that with huge=never, and restart the VM", .place.address, Size(.place.bytes))]
    LargePagesOfMount {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
        /// Where the file system is mounted.
        at: String,
        /// As in its options.
        mode: String,
    },
    /// It has some.
    #[error("{} of its memory at {:#x} ({name}, {}) are in huge pages, of which no part can be taken out safely: restart the \
        VM, which gets none any more", Size(*.bytes), .place.address, Size(.place.bytes))]
    LargePagesInUse {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
        /// How much.
        bytes: u64,
    },
    /// The guest has its memory for itself.
    #[error("its memory is private, {} at {:#x}{}: it must be shared, so start QEMU with -object \
        memory-backend-memfd,id=m,size=SIZE,share=on -machine TYPE,memory-backend=m (SIZE as of -m), or have in \
        libvirt's domain <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>",
        Size(.place.bytes), .place.address, Of(.name))]
    Private {
        /// The largest piece.
        place: Place,
        /// Of its file, if it has one.
        name: String,
    },
    /// Nothing is large enough.
    #[error("it has no shared memory of {} or more in a memfd or a file of tmpfs, nor private memory that could be a \
        guest's: is this the process that runs the VM?", Size(*.bytes_min))]
    NoMemory {
        /// What was looked for, in bytes.
        bytes_min: u64,
    },
    /// Its file is on a disk, or persistent memory.
    #[error("its memory, {} at {:#x}, is the file {name} of a file system that is not tmpfs: pages taken out of it \
        would be lost from the file, so put it into tmpfs (mem-path=/dev/shm/NAME), or use memory-backend-memfd",
        Size(.place.bytes), .place.address)]
    OnDisk {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
    },
    /// It may be other programs' memory, too.
    #[error("its memory, {} at {:#x} ({name}), is not among the guest's RAM in QEMU's command line (-machine \
        memory-backend, -numa memdev, pc-dimm, virtio-mem): other programs may map it (ivshmem), and would find zeros where \
        pages were taken out", Size(.place.bytes), .place.address)]
    NotRam {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
    },
    /// It is of huge pages.
    #[error("its memory, {} at {:#x} ({name}), has huge pages of hugetlbfs, which cannot be taken out one by one: start \
        QEMU without hugetlb=on (memory-backend-memfd), mem-path on hugetlbfs, or libvirt's <hugepages/>; transparent \
        huge pages serve instead", Size(.place.bytes), .place.address)]
    HugePages {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
    },
    /// The process can reach the same page in two ways, of which one would not be watched.
    #[error("its memory at {:#x} ({name}, {}) is mapped a second time at {again:#x} ({rights}), where touches of it \
        would go unseen: have each part of memory mapped once", .place.address, Size(.place.bytes))]
    MappedTwice {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
        /// The other address.
        again: u64,
        /// As in `rw-s`.
        rights: String,
    },
    /// Another process can reach it.
    #[error("its memory at {:#x} ({name}, {}) is mapped by process {pid} ({by}) too, which would find zeros where pages \
        were taken out: end that (a vhost-user device, as virtiofsd), and have its device within QEMU",
        .place.address, Size(.place.bytes))]
    MappedByOther {
        /// Where the target has it.
        place: Place,
        /// Of the file.
        name: String,
        /// The other process.
        pid: Pid,
        /// What that calls itself.
        by: String,
    },
    /// Its file is not to be had.
    #[error("its memory at {:#x} ({name}, {}) cannot be opened: {error}: be root, or let Larder's user write to the \
        file", .place.address, Size(.place.bytes))]
    NotOpened {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
        /// Of open(2).
        error: io::Error,
    },
    /// The file ends within the mapping.
    #[error("its memory at {:#x} ({name}, {}) goes past the end of its file, which has {file_bytes} bytes: let the \
        file be as long as size= says", .place.address, Size(.place.bytes))]
    PastEnd {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
        /// Its length.
        file_bytes: u64,
    },
    /// No page can be taken out of the memfd.
    #[error("its memory at {:#x} ({name}, {}) is sealed with {seals}, so that nothing can be taken out of it: start the \
        process without that seal", .place.address, Size(.place.bytes))]
    Sealed {
        /// Where.
        place: Place,
        /// Of the file.
        name: String,
        /// The names of the seals.
        seals: &'static str,
    },
    /// A device, or the processor, reaches memory without page faults.
    #[error("descriptor {descriptor} is {path}: {device}")]
    Device {
        /// Its number in the target.
        descriptor: i32,
        /// What it is of.
        path: String,
        /// What that means.
        device: Device,
    },
    /// io_uring writes to pages that it holds.
    #[error(
        "descriptor {descriptor} is an io_uring with {count} registered buffers, whose pages the kernel holds and \
        writes to, also after they were taken out: have none registered (QEMU itself registers none)"
    )]
    RegisteredBuffers {
        /// Its number in the target.
        descriptor: i32,
        /// How many.
        count: u64,
    },
    /// Locked in memory.
    #[error("{} of it are locked in memory (VmLck): start QEMU without -overcommit mem-lock=on, or have no <locked/> in \
        libvirt's <memoryBacking>; a device that was assigned (VFIO) counts there too", Size(*.bytes))]
    Locked {
        /// How much.
        bytes: u64,
    },
    /// Held for a device or the kernel.
    #[error("{} of it are pinned (VmPin) for a device or an io_uring, which writes to its pages also after they were \
        taken out: remove that device, or the buffers registered", Size(*.bytes))]
    Pinned {
        /// How much.
        bytes: u64,
    },
    /// Somebody traces it.
    #[error("process {by_pid} ({by}) traces its thread {tid}: detach that (a debugger, strace) first")]
    Traced {
        /// The first such thread.
        tid: Pid,
        /// The tracer's name.
        by: String,
        /// The tracer.
        by_pid: i32,
    },
    /// Another pager.
    #[error(
        "descriptor {descriptor} is a userfaultfd: somebody else sees to its page faults (QEMU itself in a post-copy \
        migration or a background snapshot, or another pager): wait for the end of that, or detach it"
    )]
    Userfaultfd {
        /// Its number in the target.
        descriptor: i32,
    },
}

impl Obstacle {
    /// Whether it may be of a mapping that was there when the list of all was read, and not any more.
    pub(super) fn may_have_gone(&self) -> bool {
        matches!(self, Self::NotOpened { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }

    /// Returns whether this forbids the successor of a pager, too. All others forbid only a first attach: the successor finds
    /// the memory managed, and the guest waits for it. Memory that cannot be opened forbids a successor only if it was managed,
    /// which the state shows ([`crate::attach::Found::find`]).
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

    /// The memory that this is about, if it is about one.
    pub fn place(&self) -> Option<Place> {
        match self {
            Self::Private { place, .. }
            | Self::OnDisk { place, .. }
            | Self::NotRam { place, .. }
            | Self::HugePages { place, .. }
            | Self::LargePagesOfMount { place, .. }
            | Self::LargePagesInUse { place, .. }
            | Self::MappedTwice { place, .. }
            | Self::MappedByOther { place, .. }
            | Self::NotOpened { place, .. }
            | Self::PastEnd { place, .. }
            | Self::Sealed { place, .. } => Some(*place),
            _ => None,
        }
    }
}

/// What reaches memory without page faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// A device of the host, assigned.
    Vfio,
    /// A network or block device of the host.
    Vdpa,
    /// Migration or storage over RDMA.
    Rdma,
    /// Buffers of the host's graphics.
    Udmabuf,
    /// Memory encrypted by AMD's processors.
    Sev,
    /// Memory that only the guest sees.
    GuestMemfd,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vfio => {
                "a device assigned to the guest reaches all of its memory: remove the device (vfio-pci, libvirt's \
                 <hostdev>), and use an emulated one"
            }
            Self::Vdpa => "a vDPA device reaches all of the guest's memory: use a virtio device of QEMU's own",
            Self::Rdma => "RDMA reaches memory that was registered with it: use TCP instead",
            Self::Udmabuf => "it pins guest memory for graphics: use virtio-gpu without blob=on",
            Self::Sev => "the memory of an encrypted guest (AMD SEV) is pinned: start the guest without sev-guest",
            Self::GuestMemfd => {
                "a confidential guest has private memory there (TDX, SEV-SNP), which cannot be read: start the guest \
                 without that"
            }
        })
    }
}

/// Bytes, for people: exact, in the largest unit that makes it so.
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

/// The file that something is of, if there is one.
struct Of<'a>(&'a str);

impl fmt::Display for Of<'_> {
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
