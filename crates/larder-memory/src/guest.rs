//! Managed memory as the pager sees it: the messages of the kernel, and operations on pages.
//!
//! There are two implementations: the memory of a process ([`ProcessMemory`]), and a simulated one.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::{FallocateFlags, SeekFrom};

use crate::external_mappings::ExternalMappings;
use crate::state::Region;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{AddressRange, FillResult, RawUffdMessage, UffdMessage, Userfaultfd};

/// Operations of the pager on the managed memory.
pub trait GuestMemory {
    /// Reads the kernel's messages into `buffer`, which must be zeros. Returns the number of messages.
    ///
    /// # Errors
    /// If the process has ended.
    fn receive(&self, buffer: &mut [RawUffdMessage]) -> io::Result<usize>;

    /// Puts pages in place, from `first` on, until one fails, and wakes the threads that wait for them. Returns the
    /// number of pages put in place, and either [`FillResult::Done`] or the reason why the next one failed. With
    /// `protect` the pages are write-protected.
    fn fill(&self, first: PageIndex, content: &[u8], protect: bool) -> (usize, FillResult);

    /// Puts a page of zeros in place.
    fn fill_zero(&self, page: PageIndex) -> FillResult;

    /// Makes a missing page unreadable: a thread that touches it gets a memory error.
    fn poison(&self, page: PageIndex) -> FillResult;

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
    fn visit_resident(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()>;

    /// Reads a page from the memory's file, mapped or not. A missing page reads as zeros, and is not allocated.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read(&self, page: PageIndex, into: &mut [u8; PAGE]) -> io::Result<()>;

    /// Removes pages from memory, in the calling thread. [`Backing::punch`] is for larger runs.
    ///
    /// # Errors
    /// If the memory's file cannot be changed.
    fn remove_pages(&self, run: PageRun) -> io::Result<()>;

    /// Forgets a region that the process has unmapped. Nothing can be done to its pages any more.
    fn drop_region(&self, region: &Region);

    /// Returns true if other processes do device I/O into this memory, which writes even to write-protected pages.
    fn has_device_io(&self) -> bool {
        false
    }

    /// Returns a mark of the current time, for [`Self::is_io_fence_passed`].
    fn io_fence(&self) -> u64 {
        0
    }

    /// Returns true if all device I/O of other processes has ended that began before `mark` was made.
    fn is_io_fence_passed(&self, _mark: u64) -> bool {
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
    fn visit_resident(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()>;
}

/// A region and its file.
struct RegionFile {
    region: Region,
    file: File,
}

/// Files of a process's memory. Regions can be added and removed at any time.
#[derive(Default)]
pub struct RegionFiles(RwLock<Vec<Arc<RegionFile>>>);

impl RegionFiles {
    /// Adds a region whose pages follow those of the others, or replaces the file of a known region.
    pub fn add(&self, region: Region, file: File) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|mapped| mapped.region.first != region.first);
        all.push(Arc::new(RegionFile { region, file }));
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
        let path = |mapped: &Arc<RegionFile>| format!("/proc/self/fd/{}", mapped.file.as_raw_fd());
        all.iter().map(path).collect()
    }

    /// Returns each file once: its device number, a descriptor, and the number of its bytes that are not allocated.
    pub(crate) fn unallocated(&self) -> Vec<(u64, OwnedFd, u64)> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut visited = Vec::new();
        let mut found = Vec::new();
        for mapped in all.iter() {
            let key = (mapped.region.device, mapped.region.inode);
            if visited.contains(&key) {
                continue;
            }
            visited.push(key);
            let (Ok(metadata), Ok(file)) = (mapped.file.metadata(), mapped.file.try_clone()) else {
                continue;
            };
            let absent = metadata.len().saturating_sub(metadata.blocks().saturating_mul(512));
            found.push((metadata.dev(), file.into(), absent));
        }
        found
    }

    fn find(&self, page: PageIndex) -> Option<Arc<RegionFile>> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let index = all.partition_point(|mapped| mapped.region.first <= page);
        let mapped = all.get(index.checked_sub(1)?)?;
        mapped.region.contains(page).then(|| Arc::clone(mapped))
    }

    /// Calls `visit` with the part of `run` in each region. Skips pages of no region.
    fn for_each_part(
        &self,
        run: PageRun,
        mut visit: impl FnMut(&RegionFile, PageRun) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut at = run.first;
        let end = run.first.get() + run.count;
        while at.get() < end {
            let Some(mapped) = self.find(at) else {
                at = at.plus(1);
                continue;
            };
            let here = (mapped.region.first.get() + mapped.region.pages).min(end) - at.get();
            visit(&mapped, PageRun { first: at, count: here })?;
            at = at.plus(here);
        }
        Ok(())
    }
}

impl Region {
    fn byte_offset_of(&self, page: PageIndex) -> u64 {
        u64::from(page.get() - self.first.get()) * PAGE_BYTES
    }

    /// Returns the address in the process of `page`, which belongs to this region.
    pub fn address_of(&self, page: PageIndex) -> u64 {
        self.address + self.byte_offset_of(page)
    }

    fn offset_of(&self, page: PageIndex) -> u64 {
        self.offset + self.byte_offset_of(page)
    }

    /// Returns the page at `address` in the process.
    pub fn page_at(&self, address: u64) -> Option<PageIndex> {
        if self.is_unmapped() {
            return None;
        }
        let within = address.checked_sub(self.address)?;
        (within < self.bytes()).then(|| self.first.plus((within / PAGE_BYTES) as u32))
    }
}

impl Backing for RegionFiles {
    fn read(&self, run: PageRun, into: &mut [u8]) -> io::Result<()> {
        self.for_each_part(run, |mapped, part| {
            let at = (part.first.get() - run.first.get()) as usize * PAGE;
            let here = &mut into[at..at + part.bytes() as usize];
            mapped.file.read_exact_at(here, mapped.region.offset_of(part.first))
        })
    }

    fn punch(&self, run: PageRun) -> io::Result<()> {
        self.for_each_part(run, |mapped, part| {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let at = mapped.region.offset_of(part.first);
            Ok(rustix::fs::fallocate(&mapped.file, flags, at, part.bytes())?)
        })
    }

    fn visit_resident(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        self.for_each_part(run, |RegionFile { region, file }, part| {
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
                found(PageRun { first: region.first.plus(first as u32), count: count as u32 });
            }
            Ok(())
        })
    }
}

/// Memory of an attached process, which other processes may have mapped too.
pub struct ProcessMemory {
    userfaultfd: Userfaultfd,
    files: Arc<RegionFiles>,
    external: ExternalMappings,
}

impl ProcessMemory {
    /// Makes the memory in `files`, whose faults `userfaultfd` reports.
    ///
    /// # Errors
    /// If a descriptor cannot be made.
    pub fn new(userfaultfd: Userfaultfd, files: Arc<RegionFiles>) -> io::Result<Self> {
        let external = ExternalMappings::new(&userfaultfd)?;
        Ok(Self { userfaultfd, files, external })
    }

    /// Returns the other processes that have the memory mapped.
    pub fn external_mappings(&self) -> &ExternalMappings {
        &self.external
    }

    /// Returns the userfaultfd of the process.
    pub fn userfaultfd(&self) -> &Userfaultfd {
        &self.userfaultfd
    }

    fn for_each_range(&self, run: PageRun, mut visit: impl FnMut(AddressRange) -> io::Result<()>) -> io::Result<()> {
        self.files.for_each_part(run, |mapped, part| {
            visit(AddressRange { start: mapped.region.address_of(part.first), len: part.bytes() })
        })
    }

    fn address_of(&self, page: PageIndex) -> Option<u64> {
        Some(self.files.find(page)?.region.address_of(page))
    }
}

impl GuestMemory for ProcessMemory {
    fn receive(&self, buffer: &mut [RawUffdMessage]) -> io::Result<usize> {
        // Views come first: a fault that is received here happened before any removal that is received below. The
        // state need not keep these faults across a kill, because the successor wakes their threads.
        let faults = match self.external.is_empty() {
            true => Vec::new(),
            false => self.external.receive(buffer.len() / 2),
        };
        let (local_slots, external_slots) = buffer.split_at_mut(buffer.len() - faults.len());
        let count = self.userfaultfd.receive(local_slots)?;
        let mut all = count;
        for (page, cause, write) in faults {
            let Some(address) = self.address_of(page) else {
                continue;
            };
            let slot = match local_slots.get_mut(all) {
                Some(place) => place,
                None => &mut external_slots[all - local_slots.len()],
            };
            // Zero, as the thread belongs to another process.
            let thread = 0;
            *slot = RawUffdMessage::from(UffdMessage::Fault { address, write, cause, thread });
            all += 1;
        }
        Ok(all)
    }

    fn fill(&self, first: PageIndex, content: &[u8], protect: bool) -> (usize, FillResult) {
        let Some(address) = self.address_of(first) else {
            return (0, FillResult::Unmapped);
        };
        let (count, filled) = self.userfaultfd.copy(address, content, protect);
        if count > 0 {
            let count = count as u32;
            self.external.wake_arrived(PageRun { first, count }, protect);
        }
        if filled != FillResult::Unmapped {
            return (count, filled);
        }
        let filled =
            self.external.fill_waiting(first, |userfaultfd, at| userfaultfd.copy(at, &content[..PAGE], false).1);
        (usize::from(filled == FillResult::Done), filled)
    }

    fn fill_zero(&self, page: PageIndex) -> FillResult {
        let Some(address) = self.address_of(page) else {
            return FillResult::Unmapped;
        };
        let filled = self.userfaultfd.zero(address);
        match filled {
            FillResult::Done => self.external.wake_arrived(PageRun::one(page), false),
            FillResult::Unmapped => return self.external.fill_waiting(page, |userfaultfd, at| userfaultfd.zero(at)),
            _ => {}
        }
        filled
    }

    fn poison(&self, page: PageIndex) -> FillResult {
        match self.address_of(page) {
            Some(address) => {
                let filled = self.userfaultfd.poison(address);
                self.external.poison(page);
                filled
            }
            None => FillResult::Unmapped,
        }
    }

    fn map(&self, page: PageIndex) {
        if let Some(address) = self.address_of(page) {
            self.userfaultfd.map(address);
            self.external.wake_arrived(PageRun::one(page), false);
        }
    }

    fn protect(&self, run: PageRun) -> io::Result<()> {
        self.for_each_range(run, |range| self.userfaultfd.protect(range))?;
        self.external.protect(run)
    }

    fn unprotect(&self, run: PageRun) -> io::Result<()> {
        let done = self.for_each_range(run, |range| self.userfaultfd.unprotect(range));
        match done {
            // The process has ended; the servers' memory is unprotected all the same.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            done => done?,
        }
        self.external.unprotect(run)
    }

    fn wake(&self, run: PageRun) {
        // Waking fails only for a process that has ended, where no thread waits.
        let _ = self.for_each_range(run, |range| self.userfaultfd.wake(range));
        self.external.wake(run);
    }

    fn visit_resident(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        self.files.visit_resident(run, found)
    }

    fn read(&self, page: PageIndex, into: &mut [u8; PAGE]) -> io::Result<()> {
        self.files.read(PageRun::one(page), into)
    }

    fn remove_pages(&self, run: PageRun) -> io::Result<()> {
        self.files.punch(run)
    }

    fn drop_region(&self, region: &Region) {
        self.files.remove(region.first);
    }

    fn has_device_io(&self) -> bool {
        !self.external.is_empty()
    }

    fn io_fence(&self) -> u64 {
        self.external.io_fence()
    }

    fn is_io_fence_passed(&self, mark: u64) -> bool {
        self.external.is_io_fence_passed(mark)
    }
}
