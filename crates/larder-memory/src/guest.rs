//! Managed memory as the pager sees it: the messages of the kernel, and operations on pages.
//!
//! There are two implementations: the memory of a process ([`Process`]), and a simulated one.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::{FallocateFlags, SeekFrom};

use crate::state::Region;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{Filled, Message, Range, RawMessage, Userfaultfd};
use crate::views::Views;

/// Operations of the pager on the managed memory.
pub trait GuestMemory {
    /// Reads the kernel's messages into `buffer`, which must be zeros. Returns the number of messages.
    ///
    /// # Errors
    /// If the process has ended.
    fn receive(&self, buffer: &mut [RawMessage]) -> io::Result<usize>;

    /// Puts pages in place, from `first` on, until one fails, and wakes the threads that wait for them. Returns the
    /// number of pages put in place, and either [`Filled::Done`] or the reason why the next one failed. With
    /// `protect` the pages are write-protected.
    fn fill(&self, first: PageIndex, content: &[u8], protect: bool) -> (usize, Filled);

    /// Puts a page of zeros in place.
    fn fill_zero(&self, page: PageIndex) -> Filled;

    /// Makes a missing page unreadable: a thread that touches it gets a memory error.
    fn poison(&self, page: PageIndex) -> Filled;

    /// Maps a page that is in memory, unprotected. Threads that wait for it retry.
    fn map(&self, page: PageIndex);

    /// Write-protects these pages: from now on writes to them fault and wait.
    ///
    /// # Errors
    /// If the process has ended, or is changing its mappings.
    fn protect(&self, run: PageRun) -> io::Result<()>;

    /// Removes the write-protection of these pages, and wakes threads that wait to write.
    ///
    /// # Errors
    /// If the process has ended, or is changing its mappings.
    fn unprotect(&self, run: PageRun) -> io::Result<()>;

    /// Wakes threads that wait for these pages. They retry.
    fn wake(&self, run: PageRun);

    /// Passes the runs of these pages that are in memory to `found`, in rising order.
    ///
    /// # Errors
    /// If the memory's file cannot be searched.
    fn present(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()>;

    /// Reads a page from the memory's file, mapped or not. A missing page reads as zeros, and is not allocated.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read(&self, page: PageIndex, into: &mut [u8; PAGE]) -> io::Result<()>;

    /// Removes pages from memory, in the calling thread. [`Backing::punch`] is for larger runs.
    ///
    /// # Errors
    /// If the memory's file cannot be changed.
    fn take_out(&self, run: PageRun) -> io::Result<()>;

    /// Forgets a region that the process has unmapped. Nothing can be done to its pages any more.
    fn forget(&self, region: &Region);

    /// Returns true if other processes do device I/O into this memory, which writes even to write-protected pages.
    fn has_device_io(&self) -> bool {
        false
    }

    /// Returns a mark of the current time, for [`Self::io_has_ended`].
    fn io_mark(&self) -> u64 {
        0
    }

    /// Returns true if all device I/O of other processes has ended that began before `mark` was made.
    fn io_has_ended(&self, _mark: u64) -> bool {
        true
    }
}

/// Operations of the worker on pages that the pager has passed to it, from another thread.
pub trait Backing: Send + Sync {
    /// Reads pages. A missing page reads as zeros, and is not allocated.
    ///
    /// # Errors
    /// If the memory's file cannot be read.
    fn read(&self, run: PageRun, into: &mut [u8]) -> io::Result<()>;

    /// Removes pages from memory.
    ///
    /// # Errors
    /// If the memory's file cannot be changed.
    fn punch(&self, run: PageRun) -> io::Result<()>;

    /// Passes the runs of these pages that are in memory to `found`, in rising order.
    ///
    /// # Errors
    /// If the memory's file cannot be searched.
    fn present(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()>;
}

/// A region and its file.
struct Mapped {
    region: Region,
    file: File,
}

/// Files of a process's memory. Regions can be added and removed at any time.
#[derive(Default)]
pub struct Files(RwLock<Vec<Arc<Mapped>>>);

impl Files {
    /// Adds a region whose pages follow those of the others, or replaces the file of a known region.
    pub fn add(&self, region: Region, file: File) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|mapped| mapped.region.first != region.first);
        all.push(Arc::new(Mapped { region, file }));
        all.sort_by_key(|mapped| mapped.region.first);
    }

    /// Removes a region. Its pages belong to no region then.
    pub fn remove(&self, first: PageIndex) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|mapped| mapped.region.first != first);
    }

    /// Returns paths through which this process can open the files.
    pub fn paths(&self) -> Vec<String> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let path = |mapped: &Arc<Mapped>| format!("/proc/self/fd/{}", mapped.file.as_raw_fd());
        all.iter().map(path).collect()
    }

    /// Returns each file once: its device number, a descriptor, and the number of its bytes that are not allocated.
    pub(crate) fn absent(&self) -> Vec<(u64, OwnedFd, u64)> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut seen = Vec::new();
        let mut found = Vec::new();
        for mapped in all.iter() {
            let key = (mapped.region.device, mapped.region.inode);
            if seen.contains(&key) {
                continue;
            }
            seen.push(key);
            let (Ok(metadata), Ok(file)) = (mapped.file.metadata(), mapped.file.try_clone()) else {
                continue;
            };
            let absent = metadata.len().saturating_sub(metadata.blocks().saturating_mul(512));
            found.push((metadata.dev(), file.into(), absent));
        }
        found
    }

    fn of(&self, page: PageIndex) -> Option<Arc<Mapped>> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let index = all.partition_point(|mapped| mapped.region.first <= page);
        let mapped = all.get(index.checked_sub(1)?)?;
        mapped.region.contains(page).then(|| Arc::clone(mapped))
    }

    /// Calls `what` with the part of `run` in each region. Skips pages of no region.
    fn each(&self, run: PageRun, mut what: impl FnMut(&Mapped, PageRun) -> io::Result<()>) -> io::Result<()> {
        let mut at = run.first;
        let end = run.first.get() + run.count;
        while at.get() < end {
            let Some(mapped) = self.of(at) else {
                at = at.plus(1);
                continue;
            };
            let here = (mapped.region.first.get() + mapped.region.pages).min(end) - at.get();
            what(&mapped, PageRun { first: at, count: here })?;
            at = at.plus(here);
        }
        Ok(())
    }
}

impl Region {
    fn pages_in(&self, page: PageIndex) -> u64 {
        u64::from(page.get() - self.first.get()) * PAGE_BYTES
    }

    /// Returns the address in the process of `page`, which belongs to this region.
    pub fn address_of(&self, page: PageIndex) -> u64 {
        self.address + self.pages_in(page)
    }

    fn offset_of(&self, page: PageIndex) -> u64 {
        self.offset + self.pages_in(page)
    }

    /// Returns the page at `address` in the process.
    pub fn page_at(&self, address: u64) -> Option<PageIndex> {
        if self.is_gone() {
            return None;
        }
        let within = address.checked_sub(self.address)?;
        (within < self.bytes()).then(|| self.first.plus((within / PAGE_BYTES) as u32))
    }
}

impl Backing for Files {
    fn read(&self, run: PageRun, into: &mut [u8]) -> io::Result<()> {
        self.each(run, |mapped, part| {
            let at = (part.first.get() - run.first.get()) as usize * PAGE;
            let here = &mut into[at..at + part.bytes() as usize];
            mapped.file.read_exact_at(here, mapped.region.offset_of(part.first))
        })
    }

    fn punch(&self, run: PageRun) -> io::Result<()> {
        self.each(run, |mapped, part| {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let at = mapped.region.offset_of(part.first);
            Ok(rustix::fs::fallocate(&mapped.file, how, at, part.bytes())?)
        })
    }

    fn present(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        self.each(run, |Mapped { region, file }, part| {
            let end = region.offset_of(part.first) + part.bytes();
            let mut at = region.offset_of(part.first);
            while at < end {
                // Pages in the kernel's swap are data too.
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
            Ok(())
        })
    }
}

/// Memory of an attached process, which other processes may have mapped too.
pub struct Process {
    userfaultfd: Userfaultfd,
    files: Arc<Files>,
    views: Views,
}

impl Process {
    /// Makes the memory in `files`, whose faults `userfaultfd` reports.
    ///
    /// # Errors
    /// If a descriptor cannot be made.
    pub fn new(userfaultfd: Userfaultfd, files: Arc<Files>) -> io::Result<Self> {
        let views = Views::new(&userfaultfd)?;
        Ok(Self {
            userfaultfd,
            files,
            views,
        })
    }

    /// Returns the other processes that have the memory mapped.
    pub fn views(&self) -> &Views {
        &self.views
    }

    /// Returns the userfaultfd of the process.
    pub fn userfaultfd(&self) -> &Userfaultfd {
        &self.userfaultfd
    }

    fn each(&self, run: PageRun, mut what: impl FnMut(Range) -> io::Result<()>) -> io::Result<()> {
        self.files.each(run, |mapped, part| {
            what(Range {
                start: mapped.region.address_of(part.first),
                len: part.bytes(),
            })
        })
    }

    fn address_of(&self, page: PageIndex) -> Option<u64> {
        Some(self.files.of(page)?.region.address_of(page))
    }
}

impl GuestMemory for Process {
    fn receive(&self, buffer: &mut [RawMessage]) -> io::Result<usize> {
        // Views come first: a fault that is received here happened before any removal that is received below. The
        // state need not keep these faults across a kill, because the successor wakes their threads.
        let faults = match self.views.is_empty() {
            true => Vec::new(),
            false => self.views.receive(buffer.len() / 2),
        };
        let (rest, theirs) = buffer.split_at_mut(buffer.len() - faults.len());
        let count = self.userfaultfd.receive(rest)?;
        let mut all = count;
        for (page, cause, write) in faults {
            let Some(address) = self.address_of(page) else {
                continue;
            };
            let place = match rest.get_mut(all) {
                Some(place) => place,
                None => &mut theirs[all - rest.len()],
            };
            // Zero, as the thread belongs to another process.
            let thread = 0;
            *place = RawMessage::from(Message::Fault {
                address,
                write,
                cause,
                thread,
            });
            all += 1;
        }
        Ok(all)
    }

    fn fill(&self, first: PageIndex, content: &[u8], protect: bool) -> (usize, Filled) {
        let Some(address) = self.address_of(first) else {
            return (0, Filled::Gone);
        };
        let (count, filled) = self.userfaultfd.copy(address, content, protect);
        if count > 0 {
            let count = count as u32;
            self.views.arrived(PageRun { first, count }, protect);
        }
        if filled != Filled::Gone {
            return (count, filled);
        }
        let filled = self
            .views
            .fill_waiting(first, |view, at| view.copy(at, &content[..PAGE], false).1);
        (usize::from(filled == Filled::Done), filled)
    }

    fn fill_zero(&self, page: PageIndex) -> Filled {
        let Some(address) = self.address_of(page) else {
            return Filled::Gone;
        };
        let filled = self.userfaultfd.zero(address);
        match filled {
            Filled::Done => self.views.arrived(PageRun::one(page), false),
            Filled::Gone => return self.views.fill_waiting(page, |view, at| view.zero(at)),
            _ => {}
        }
        filled
    }

    fn poison(&self, page: PageIndex) -> Filled {
        match self.address_of(page) {
            Some(address) => {
                let filled = self.userfaultfd.poison(address);
                self.views.poison(page);
                filled
            }
            None => Filled::Gone,
        }
    }

    fn map(&self, page: PageIndex) {
        if let Some(address) = self.address_of(page) {
            self.userfaultfd.map(address);
            self.views.arrived(PageRun::one(page), false);
        }
    }

    fn protect(&self, run: PageRun) -> io::Result<()> {
        self.each(run, |range| self.userfaultfd.protect(range))?;
        self.views.protect(run)
    }

    fn unprotect(&self, run: PageRun) -> io::Result<()> {
        let done = self.each(run, |range| self.userfaultfd.unprotect(range));
        match done {
            // The process has ended; the servers' memory is unprotected all the same.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            done => done?,
        }
        self.views.unprotect(run)
    }

    fn wake(&self, run: PageRun) {
        // Waking fails only for a process that has ended, where no thread waits.
        let _ = self.each(run, |range| self.userfaultfd.wake(range));
        self.views.wake(run);
    }

    fn present(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        self.files.present(run, found)
    }

    fn read(&self, page: PageIndex, into: &mut [u8; PAGE]) -> io::Result<()> {
        self.files.read(PageRun::one(page), into)
    }

    fn take_out(&self, run: PageRun) -> io::Result<()> {
        self.files.punch(run)
    }

    fn forget(&self, region: &Region) {
        self.files.remove(region.first);
    }

    fn has_device_io(&self) -> bool {
        !self.views.is_empty()
    }

    fn io_mark(&self) -> u64 {
        self.views.io_mark()
    }

    fn io_has_ended(&self, mark: u64) -> bool {
        self.views.io_has_ended(mark)
    }
}
