//! The memory that is managed, as the pager sees it: what the kernel says of it, and what can be done to a page.
//!
//! Two kinds: that of a process ([`Process`]), and a simulated one.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, SeekFrom};

use crate::state::Region;
use crate::units::{PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{Filled, Range, RawMessage, Userfaultfd};

/// What the owner of the pages does with them.
pub trait GuestMemory {
    /// Reads what the kernel has to say into `buffer`, of zeros; how many messages.
    ///
    /// # Errors
    /// The process has ended.
    fn receive(&self, buffer: &mut [RawMessage]) -> io::Result<usize>;

    /// Puts pages in place, from `first` on, until one cannot be; wakes who waits for them.
    fn fill(&self, first: PageIndex, content: &[u8], protect: bool) -> (usize, Filled);

    /// Puts a page of zeros in place.
    fn fill_zero(&self, page: PageIndex) -> Filled;

    /// Makes a missing page one that cannot be read; whether that could be done.
    fn poison(&self, page: PageIndex) -> bool;

    /// Writes to these pages are told and wait from now on.
    ///
    /// # Errors
    /// The process has ended, or is changing its mappings.
    fn protect(&self, run: PageRun) -> io::Result<()>;

    /// Writes are free again; wakes who waits for that.
    ///
    /// # Errors
    /// The process has ended, or is changing its mappings.
    fn unprotect(&self, run: PageRun) -> io::Result<()>;

    /// Who waits for these pages tries again.
    fn wake(&self, run: PageRun);

    /// Which of these pages are in memory, in rising order.
    ///
    /// # Errors
    /// Of the memory's file.
    fn present(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()>;
}

/// What a thread beside the owner does with pages that the owner has given to it.
pub trait Backing: Send + Sync {
    /// Reads pages; what is not there reads as zeros, and is not made.
    ///
    /// # Errors
    /// Of the memory's file.
    fn read(&self, run: PageRun, into: &mut [u8]) -> io::Result<()>;

    /// Takes pages out of memory.
    ///
    /// # Errors
    /// Of the memory's file.
    fn punch(&self, run: PageRun) -> io::Result<()>;

    /// Which of these pages are in memory, in rising order.
    ///
    /// # Errors
    /// Of the memory's file.
    fn present(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()>;
}

/// A region and its file.
struct Mapped {
    region: Region,
    file: File,
}

/// The files of a process's memory.
pub struct Files(Vec<Mapped>);

impl Files {
    /// Of regions and their files, in the order of their pages.
    pub fn new(regions: Vec<(Region, File)>) -> Self {
        Self(
            regions
                .into_iter()
                .map(|(region, file)| Mapped { region, file })
                .collect(),
        )
    }

    fn of(&self, page: PageIndex) -> &Mapped {
        let index = self.0.partition_point(|mapped| mapped.region.first <= page);
        match index.checked_sub(1).and_then(|index| self.0.get(index)) {
            Some(mapped) if mapped.region.contains(page) => mapped,
            _ => panic!("{page:?} is of no region"),
        }
    }

    /// The parts of `run` in each region.
    fn parts(&self, run: PageRun) -> impl Iterator<Item = (&Mapped, PageRun)> {
        let mut rest = Some(run);
        std::iter::from_fn(move || {
            let run = rest.take()?;
            let mapped = self.of(run.first);
            let here = (mapped.region.first.get() + mapped.region.pages - run.first.get()).min(run.count);
            rest = (here < run.count).then(|| PageRun {
                first: run.first.plus(here),
                count: run.count - here,
            });
            Some((
                mapped,
                PageRun {
                    first: run.first,
                    count: here,
                },
            ))
        })
    }
}

impl Region {
    fn pages_in(&self, page: PageIndex) -> u64 {
        u64::from(page.get() - self.first.get()) * PAGE_BYTES
    }

    /// Where the process has `page`, which is of this region.
    pub fn address_of(&self, page: PageIndex) -> u64 {
        self.address + self.pages_in(page)
    }

    fn offset_of(&self, page: PageIndex) -> u64 {
        self.offset + self.pages_in(page)
    }

    /// The page that the process has at `address`.
    pub fn page_at(&self, address: u64) -> Option<PageIndex> {
        let within = address.checked_sub(self.address)?;
        (within < self.bytes()).then(|| self.first.plus((within / PAGE_BYTES) as u32))
    }
}

impl Backing for Files {
    fn read(&self, run: PageRun, into: &mut [u8]) -> io::Result<()> {
        let mut into = into;
        for (mapped, part) in self.parts(run) {
            let (here, rest) = std::mem::take(&mut into).split_at_mut(part.bytes() as usize);
            mapped.file.read_exact_at(here, mapped.region.offset_of(part.first))?;
            into = rest;
        }
        Ok(())
    }

    fn punch(&self, run: PageRun) -> io::Result<()> {
        for (mapped, part) in self.parts(run) {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&mapped.file, how, mapped.region.offset_of(part.first), part.bytes())?;
        }
        Ok(())
    }

    fn present(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        for (Mapped { region, file }, part) in self.parts(run) {
            let end = region.offset_of(part.first) + part.bytes();
            let mut at = region.offset_of(part.first);
            while at < end {
                // Pages that the kernel has in its own swap are data too.
                let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                    Ok(start) if start < end => start,
                    Ok(_) | Err(rustix::io::Errno::NXIO) => break,
                    Err(error) => return Err(error.into()),
                };
                at = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(end);
                let first = (start - region.offset) / PAGE_BYTES;
                let count = (at - region.offset).div_ceil(PAGE_BYTES) - first;
                found(PageRun {
                    first: region.first.plus(first as u32),
                    count: count as u32,
                });
            }
        }
        Ok(())
    }
}

/// The memory of a process that was attached to.
pub struct Process {
    userfaultfd: Userfaultfd,
    files: Arc<Files>,
}

impl Process {
    /// Memory in `files`, of which `userfaultfd` tells.
    pub fn new(userfaultfd: Userfaultfd, files: Arc<Files>) -> Self {
        Self { userfaultfd, files }
    }

    /// What tells of it.
    pub fn userfaultfd(&self) -> &Userfaultfd {
        &self.userfaultfd
    }

    fn ranges(&self, run: PageRun) -> impl Iterator<Item = Range> {
        self.files.parts(run).map(|(mapped, part)| Range {
            start: mapped.region.address_of(part.first),
            len: part.bytes(),
        })
    }
}

impl GuestMemory for Process {
    fn receive(&self, buffer: &mut [RawMessage]) -> io::Result<usize> {
        self.userfaultfd.receive(buffer)
    }

    fn fill(&self, first: PageIndex, content: &[u8], protect: bool) -> (usize, Filled) {
        let region = &self.files.of(first).region;
        self.userfaultfd.copy(region.address_of(first), content, protect)
    }

    fn fill_zero(&self, page: PageIndex) -> Filled {
        let region = &self.files.of(page).region;
        self.userfaultfd.zero(region.address_of(page))
    }

    fn poison(&self, page: PageIndex) -> bool {
        let region = &self.files.of(page).region;
        self.userfaultfd.poison(region.address_of(page)).is_ok()
    }

    fn protect(&self, run: PageRun) -> io::Result<()> {
        self.ranges(run).try_for_each(|range| self.userfaultfd.protect(range))
    }

    fn unprotect(&self, run: PageRun) -> io::Result<()> {
        self.ranges(run).try_for_each(|range| self.userfaultfd.unprotect(range))
    }

    fn wake(&self, run: PageRun) {
        for range in self.ranges(run) {
            // It fails only for a process that has ended, where nobody waits.
            let _ = self.userfaultfd.wake(range);
        }
    }

    fn present(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        self.files.present(run, found)
    }
}
