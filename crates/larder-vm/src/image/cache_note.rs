//! State file of a cache, kept apart from the cache while a server uses it.
//!
//! A cache that was not closed is used only if its state file confirms that: the file must belong to the cache's last
//! session, and must not record that the device failed, since a failed device cannot record that itself. After a
//! failure the file also records which parts of the cache's dirty data are superseded by newer data on the disk.
//!
//! The file also names the uses of the disk whose marks prove for this cache that no other program has written to the
//! disk since the server was killed ([`super::proof`]). A cache with that proof is used as it is; otherwise each of
//! its clean lines is compared with the disk before it is used.
//!
//! Without proof, the cache is discarded if the times of the disk's files show a foreign change. For this the state
//! file has the files' fingerprints, and gets new ones soon after the server has changed the files ([`Made::keep`]).
//! On a busy file system that may be too late. So at each check the same content is also written, without a flush, to
//! the user's directory in the host's memory, which outlives the server. The timestamp of that copy shows that the
//! server was alive then, and that it made all earlier changes.
//!
//! The state file is removed when the cache is closed, unless part of the disk is on a device or an export, which
//! have no modification times. Such a cache is used later only if its state file still exists. A server or command of
//! this user that opens the disk for writing without the cache creates a mark: a file with the name of the state file
//! and the extension `used`. It does not edit the state file, because the cache's server may be writing that file at
//! this moment, and would not see the change.
//!
//! If the state file is lost, or belongs to another user or host, a cache that was not closed starts empty; one that
//! may be dirty is refused.
//!
//! The new text is written to a temporary file, which then replaces the old file. Its lines are:
//!
//! ```text
//! sessions 6 7             sessions of the cache that the file is valid for
//! disk 72617720...         the disk's identity, hexadecimal
//! cache 2f737364...        path or URI of the cache, hexadecimal
//! clock 5f3c... 1700000000 time of the fingerprints: host's boot ID, clock's seconds minus those since boot
//! uses 5be1... 20c3...     uses of the disk whose marks count for this cache, hexadecimal
//! stamp 0000002a... 17...  fingerprint of each file, hexadecimal, and its ctime in nanoseconds, unless it is unknown or
//!                          must not count as proof; `written` if the server writes to the file
//! dirty                    the cache may be dirty
//! used                     the cache was given up: since then the disk is used without it
//! detached                 the device has failed: only the dirty data may be used
//! superseded 4096 8192     except for this range of the disk: offset and length in bytes
//! end                      the file is complete
//! ```

mod made;

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use larder_block::ByteRange;
use larder_block::opener::{Access, PathSource, opener};
use larder_block::small_file::{self, STATE_BYTES_MAX};
use larder_cache::{FailureRecord, Superblock, Verdict};
pub(super) use made::Made;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock};
use rustix::process::geteuid;

use super::disk_id::{self, DiskFile, FileStamp};
use super::host_clock::HostClock;
use super::proof::Proof;
use super::{ImageAddress, absolute};
use crate::opener::helper;
use crate::private_folder;
use crate::runtime_folder::{self, runtime_folder};

/// The state file of a cache, which may or may not exist.
#[derive(Clone, Debug)]
pub(super) struct Note {
    /// Path of the state file; `None` if no directory for it is known.
    path: Option<PathBuf>,
}

impl Note {
    /// Returns the state file of the cache with this superblock. A command, or a server without a directory of its
    /// own, finds an existing file in any directory.
    pub(super) fn of(superblock: &Superblock) -> Self {
        let name = hex(&superblock.uuid);
        let own = notes_folder().map(|folder| folder.join(&name));
        let is_own = private_folder::state().is_some() || own.as_ref().is_some_and(|path| path.exists());
        let elsewhere = || folders().map(|folder| folder.join(&name)).find(|path| path.exists());
        Self {
            path: if is_own { own } else { elsewhere().or(own) },
        }
    }

    /// Moves an existing state file to this process's directory, if there is none yet. It may be in another
    /// directory, where a server without a directory of its own created it. `disk` is the disk's identity.
    ///
    /// # Errors
    /// Access to one of the files fails.
    pub(super) fn adopt(&self, disk: &[u8]) -> io::Result<()> {
        let (Some(path), Some(_)) = (&self.path, private_folder::state()) else {
            return Ok(());
        };
        if path.try_exists()? {
            return Ok(());
        }
        let mut all = of_disk(disk_id::disk_of(disk)).into_iter();
        let Some(other) = all.rfind(|other| other.path.file_name() == self.name()) else {
            return Ok(());
        };
        DirBuilder::new().recursive(true).mode(0o700).create(folder_of(path))?;
        other.noted.write(path)?;
        opener().remove(&other.path)?;
        // The state file contains the mark by now.
        match opener().remove(&used_mark(&other.path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Evaluates the state file of a cache that was not closed, for a disk of these files.
    pub(super) fn says(&self, superblock: &Superblock, files: &[DiskFile], proof: &Proof) -> Says {
        let Some(noted) = self.read_of(superblock) else {
            return Says::Nothing;
        };
        let may_be_ours_lately = || {
            let (lately, alive) = self.read_lately().ok()?;
            let is_of_it = lately.sessions.contains(&superblock.session);
            is_of_it.then(|| lately.may_be_only_ours(files, Some(alive)))
        };
        let may_be_ours = || noted.may_be_only_ours(files, None) || may_be_ours_lately() == Some(true);
        let boot = noted.clock.map(|clock| clock.boot);
        let verdict = match proof.verdict(files, &noted.stamps, boot, &noted.uses) {
            _ if noted.is_used => Verdict::Changed,
            Verdict::Unproven if !may_be_ours() => Verdict::Changed,
            verdict => verdict,
        };
        match (verdict, noted.detached) {
            (Verdict::Changed, _) => Says::Changed,
            (verdict, None) => Says::Believe(verdict),
            (_, Some(superseded)) => Says::Detached(FailureRecord { superseded }),
        }
    }

    /// Returns the uses of the disk that the state file names for the cache's last session.
    pub(super) fn uses(&self, superblock: &Superblock) -> Vec<u64> {
        self.read_of(superblock).map_or_else(Vec::new, |noted| noted.uses)
    }

    /// Evaluates the state file of a cache that was closed.
    pub(super) fn says_of_closed(&self, superblock: &Superblock) -> Says {
        match self.read_of(superblock) {
            None => Says::Nothing,
            // If the file already records that the cache is detached, a server that found it so was killed before it
            // had emptied the cache.
            Some(noted) if noted.is_used || noted.detached.is_some() => Says::Changed,
            Some(_) => Says::Believe(Verdict::Unchanged),
        }
    }

    /// Returns the cache's address if the closed cache with this superblock is an older copy, and the cache itself
    /// may be dirty.
    pub(super) fn newer_than(&self, superblock: &Superblock) -> Option<String> {
        let is_newer = |noted: &Noted| noted.sessions.iter().all(|session| superblock.session < *session);
        let newer = self.read().filter(|noted| noted.is_dirty && is_newer(noted))?;
        Some(String::from_utf8_lossy(&newer.cache).into_owned())
    }

    /// Copies the state file of a closed cache for a copy of that cache.
    ///
    /// # Errors
    /// Writing the copy fails.
    pub(super) fn copy_to(&self, superblock: &Superblock, copy: &Superblock) -> io::Result<()> {
        let copied = Self::of(copy);
        match (self.read_of(superblock), &copied.path) {
            (Some(noted), Some(path)) => Noted {
                sessions: vec![copy.session],
                ..noted
            }
            .write(path),
            _ => Ok(()),
        }
    }

    /// Returns whether the cache may be dirty, according to its state file, and is on a file or device, not behind an
    /// NBD server.
    pub(super) fn says_dirty_at_a_path(&self) -> bool {
        let is_at_a_path = |noted: &Noted| matches!(file_in(&noted.cache), Some(ImageAddress::Path(_)));
        self.read().is_some_and(|noted| noted.is_dirty && is_at_a_path(&noted))
    }

    /// Reads the state file, if it covers the cache's last session.
    fn read_of(&self, superblock: &Superblock) -> Option<Noted> {
        self.read().filter(|noted| noted.sessions.contains(&superblock.session))
    }

    fn read(&self) -> Option<Noted> {
        Noted::read(self.path.as_ref()?)
    }

    /// Returns the cache's UUID as text.
    fn name(&self) -> Option<&OsStr> {
        self.path.as_ref().and_then(|path| path.file_name())
    }

    /// Creates the state file, durably, for the last session and the one that is about to begin. `detached` describes
    /// the last session. The last of `uses` is about to begin, too. Unless `is_proven` says that no other program has
    /// written to the disk, the ctimes are left out until the opened cache knows what it has to compare: after a kill
    /// before that they would prove that all of it is right.
    ///
    /// # Errors
    /// Writing fails; an old file, if there is one, still covers the last session alone.
    pub(super) fn make(
        &self,
        superblock: &Superblock,
        cache: &ImageAddress,
        is_dirty: bool,
        detached: Option<&FailureRecord>,
        (files, is_proven): (&[DiskFile], bool),
        uses: Vec<u64>,
    ) -> io::Result<Made> {
        let nowhere = || io::Error::other("no state directory is known: neither $XDG_STATE_HOME nor $HOME is set");
        let path = self.path.as_ref().ok_or_else(nowhere)?;
        DirBuilder::new().recursive(true).mode(0o700).create(folder_of(path))?;
        let mut stamps = disk_id::stamps_of_all(files);
        if !is_proven {
            stamps.iter_mut().for_each(|stamp| stamp.changed_ns = None);
        }
        let noted = Noted {
            sessions: vec![superblock.session, superblock.session.wrapping_add(1)],
            disk: superblock.disk.identity.clone(),
            cache: absolute(cache).into_bytes(),
            is_used: false,
            is_dirty,
            detached: detached.map(|detached| detached.superseded.clone()),
            clock: HostClock::now(),
            uses,
            stamps,
        };
        noted.write(path)?;
        // A mark that existed is included in the state file now.
        match fs::remove_file(used_mark(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Made::new(self.clone(), Some(noted), files))
    }

    /// Returns a handle without a state file, for when creating it has failed.
    pub(super) fn unmade(&self) -> Made {
        Made::new(self.clone(), None, &[])
    }

    /// Removes the state file, durably.
    ///
    /// # Errors
    /// Removal fails; the file may still exist.
    pub(super) fn take_back(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        if let Some(lately) = self.lately() {
            let _ = fs::remove_file(lately);
        }
        let gone = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        };
        fs::remove_file(path).or_else(gone)?;
        fs::remove_file(used_mark(path)).or_else(gone)?;
        // The temporary file of a process that was killed while writing.
        let _ = fs::remove_file(new_of(path));
        File::open(folder_of(path))
            .and_then(|folder| folder.sync_all())
            .or_else(gone)
    }

    /// Returns the path of the copy of the state file in the host's memory.
    fn lately(&self) -> Option<PathBuf> {
        let name = self.path.as_ref()?.file_name()?;
        Some(lately_folder().join(name))
    }

    /// Reads the copy in memory; also returns when its server was last alive.
    ///
    /// # Errors
    /// The copy cannot be read, or other users may have written it.
    fn read_lately(&self) -> io::Result<(Noted, SystemTime)> {
        let path = self.lately().ok_or(io::ErrorKind::NotFound)?;
        for folder in path.ancestors().skip(1).take(2) {
            runtime_folder::is_ours_alone(folder)?;
        }
        let alive = fs::metadata(&path)?.modified()?;
        let lately = Noted::parse(&small_file::read_text(&path, STATE_BYTES_MAX)?);
        Ok((lately.ok_or(io::ErrorKind::InvalidData)?, alive))
    }

    /// Returns the path of a companion file of the state file, with this extension.
    pub(super) fn beside(&self, ending: &str) -> Option<PathBuf> {
        self.path.as_ref().map(|path| path.with_extension(ending))
    }

    /// Returns the path of the state file, for messages.
    pub(super) fn place(&self) -> String {
        match &self.path {
            Some(path) => path.display().to_string(),
            None => "no path, because neither $XDG_STATE_HOME nor $HOME is set".to_owned(),
        }
    }
}

/// Lock on a cache in use, for a cache on an export, which cannot be locked itself.
pub(super) struct Lock {
    path: PathBuf,
    _file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file is removed before the lock is released, so that no other process can hold a file of this name.
        let _ = fs::remove_file(&self.path);
    }
}

impl Note {
    /// Locks the cache, if there is a directory for the lock file.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another process uses the cache, or an error of the file system.
    pub(super) fn lock(&self) -> io::Result<Option<Lock>> {
        let Some(path) = self.beside("lock") else {
            return Ok(None);
        };
        DirBuilder::new().recursive(true).mode(0o700).create(folder_of(&path))?;
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false);
            // `O_NONBLOCK` fails on a FIFO without a reader, instead of waiting for one.
            let file = options.custom_flags(libc::O_NONBLOCK).open(&path)?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            // The previous owner may have removed the file in between.
            let is_it =
                fs::metadata(&path).is_ok_and(|found| file.metadata().is_ok_and(|ours| ours.ino() == found.ino()));
            if is_it {
                return Ok(Some(Lock { path, _file: file }));
            }
        }
    }
}

/// Verdict of the state file on a cache that was not closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Says {
    /// The cache worked until its server ended. The verdict, which is never [`Verdict::Changed`], is on foreign
    /// writes to the disk since.
    Believe(Verdict),
    /// The cache's device failed, and as far as is known no other program has written to the disk since.
    Detached(FailureRecord),
    /// Another program has written to the disk since.
    Changed,
    /// There is no state file, or it does not cover the cache's last session.
    Nothing,
}

/// Content of a state file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Noted {
    /// Sessions of the cache that the file covers.
    sessions: Vec<u32>,
    /// The identity of the disk.
    disk: Vec<u8>,
    /// Address of the cache, in a form that is valid in every process of this host.
    cache: Vec<u8>,
    /// The disk has since been opened for writing without the cache.
    is_used: bool,
    /// The cache may be dirty.
    is_dirty: bool,
    /// The device has failed; the superseded ranges are sorted, and do not touch each other.
    detached: Option<Vec<ByteRange>>,
    /// Setting of the host's clock when the fingerprints were recorded.
    clock: Option<HostClock>,
    /// Uses of the disk whose marks count for the cache.
    uses: Vec<u64>,
    /// Fingerprints of the disk's files.
    stamps: Vec<FileStamp>,
}

impl Noted {
    /// Reads the state file at `path`, including a mark that other processes have created.
    fn read(path: &Path) -> Option<Self> {
        let mut noted = Self::parse(&small_file::read_text(path, STATE_BYTES_MAX).ok()?)?;
        // A mark that cannot be checked counts as present.
        noted.is_used |= used_mark(path).try_exists().unwrap_or(true);
        Some(noted)
    }

    /// Parses a state file; `None` if it is incomplete, or in a format that this program does not write.
    fn parse(text: &str) -> Option<Self> {
        let mut noted = Self {
            sessions: Vec::new(),
            disk: Vec::new(),
            cache: Vec::new(),
            is_used: false,
            is_dirty: false,
            detached: None,
            clock: None,
            uses: Vec::new(),
            stamps: Vec::new(),
        };
        let (lines, rest) = text.split_once("\nend\n")?;
        if !rest.is_empty() {
            return None;
        }
        for line in lines.lines() {
            let (word, values) = line.split_once(' ').unwrap_or((line, ""));
            let mut numbers = values.split(' ');
            match word {
                "sessions" => noted.sessions = numbers.map(str::parse).collect::<Result<_, _>>().ok()?,
                "disk" => noted.disk = from_hex(values)?,
                "cache" => noted.cache = from_hex(values)?,
                "used" => noted.is_used = true,
                "dirty" => noted.is_dirty = true,
                "stamp" | "written" => {
                    // Earlier versions have recorded no ctime.
                    let (bytes, changed) = match values.split_once(' ') {
                        Some((bytes, changed)) => (bytes, Some(changed.parse().ok()?)),
                        None => (values, None),
                    };
                    noted.stamps.push(FileStamp {
                        is_written: word == "written",
                        bytes: from_hex(bytes)?,
                        changed_ns: changed,
                    });
                }
                "clock" => {
                    let (boot, ahead) = values.split_once(' ')?;
                    noted.clock = Some(HostClock {
                        boot: u128::from_str_radix(boot, 16).ok()?,
                        ahead_seconds: ahead.parse().ok()?,
                    });
                }
                "uses" => {
                    let uses = values.split(' ').map(|of_use| u64::from_str_radix(of_use, 16));
                    noted.uses = uses.collect::<Result<_, _>>().ok()?;
                }
                "detached" => {
                    noted.detached.get_or_insert_default();
                }
                "superseded" => {
                    let mut number = || numbers.next()?.parse::<u64>().ok();
                    let (start, len) = (number()?, number()?);
                    start.checked_add(len)?;
                    noted.detached.as_mut()?.push(ByteRange::new(start, len));
                }
                _ => return None,
            }
        }
        Some(noted)
    }

    fn text(&self) -> String {
        let sessions: String = self.sessions.iter().map(|session| format!(" {session}")).collect();
        let mut text = format!(
            "sessions{sessions}\ndisk {}\ncache {}\n",
            hex(&self.disk),
            hex(&self.cache)
        );
        if let Some(HostClock { boot, ahead_seconds }) = self.clock {
            text.push_str(&format!("clock {boot:x} {ahead_seconds}\n"));
        }
        if !self.uses.is_empty() {
            let uses: String = self.uses.iter().map(|of_use| format!(" {of_use:x}")).collect();
            text.push_str(&format!("uses{uses}\n"));
        }
        for stamp in &self.stamps {
            let word = if stamp.is_written { "written" } else { "stamp" };
            let changed = stamp.changed_ns.map(|changed| format!(" {changed}"));
            text.push_str(&format!(
                "{word} {}{}\n",
                hex(&stamp.bytes),
                changed.unwrap_or_default()
            ));
        }
        if self.is_used {
            text.push_str("used\n");
        }
        if self.is_dirty {
            text.push_str("dirty\n");
        }
        if let Some(superseded) = &self.detached {
            text.push_str("detached\n");
            for range in superseded {
                text.push_str(&format!("superseded {} {}\n", range.start.get(), range.len.get()));
            }
        }
        text + "end\n"
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        write_whole(path, &self.text())
    }

    /// Replaces the fingerprints by current ones.
    fn set_stamps(&mut self, stamps: Vec<FileStamp>) {
        self.clock = HostClock::now();
        self.stamps = stamps;
    }

    /// Returns whether only the disk's own server may have written to its files since; `alive` is its last sign of
    /// life, if known.
    fn may_be_only_ours(&self, files: &[DiskFile], alive: Option<SystemTime>) -> bool {
        let step = self.clock.map_or(0, HostClock::step);
        disk_id::may_be_only_ours_since(files, &self.stamps, alive, step)
    }

    /// Drops the sessions and uses before the last ones: a copy of the cache from an earlier session must not be
    /// used.
    fn drop_old_sessions(&mut self) {
        let last = self.sessions.len().saturating_sub(1);
        self.sessions.drain(..last);
        let last = self.uses.len().saturating_sub(1);
        self.uses.drain(..last);
    }

    /// Adds a superseded range, and merges it with those that it touches.
    fn supersede(&mut self, range: ByteRange) {
        let superseded = self.detached.get_or_insert_default();
        let touches = |other: &ByteRange| other.start <= range.end() && range.start <= other.end();
        let first = superseded.partition_point(|other| other.end() < range.start);
        let touching = superseded[first..].iter().take_while(|other| touches(other)).count();
        let all = superseded.drain(first..first + touching);
        let (start, end) = all.fold((range.start, range.end()), |(start, end), other| {
            (start.min(other.start), end.max(other.end()))
        });
        superseded.insert(first, ByteRange::between(start, end));
    }
}

/// The state file of a cache without which a disk is about to be used.
pub(super) struct Other {
    path: PathBuf,
    noted: Noted,
}

/// Returns the directories of state files that this process can access without a helper.
fn folders() -> impl Iterator<Item = PathBuf> {
    let mut above: Vec<PathBuf> = state_folder().into_iter().collect();
    if geteuid().is_root() {
        let services = fs::read_dir(OF_VMS).into_iter().flatten().flatten();
        above.extend(services.map(|service| service.path()));
    }
    let private: Vec<PathBuf> = above.iter().flat_map(|folder| private_folder::all_in(folder)).collect();
    above.into_iter().chain(private).map(|folder| folder.join(FOLDER))
}

/// Returns all state files that this process can read without a helper.
fn all() -> impl Iterator<Item = Other> {
    let notes = folders().filter_map(|folder| fs::read_dir(folder).ok());
    let paths = notes.flatten().flatten().map(|note| note.path());
    let paths = paths.filter(|path| path.extension().is_none());
    paths.filter_map(|path| {
        let noted = Noted::read(&path)?;
        Some(Other { path, noted })
    })
}

/// Returns the paths of the state files of all caches of a disk, which is identified as by [`disk_id::disk_of`].
pub(crate) fn notes_of_disk(disk: &[u8]) -> Vec<PathBuf> {
    let of_disk = all().filter(|other| disk_id::disk_of(&other.noted.disk) == disk);
    of_disk.map(|other| other.path).collect()
}

/// Returns the paths of the state files of all caches of the disk in an image.
pub(crate) fn notes_of_image(image: &ImageAddress) -> Vec<PathBuf> {
    let is_its = |other: &Other| disk_id::is_disk(image, disk_id::disk_of(&other.noted.disk));
    all().filter(is_its).map(|other| other.path).collect()
}

/// Returns the state files of all caches of a disk.
fn of_disk(disk: &[u8]) -> Vec<Other> {
    let read = |path: PathBuf| {
        let noted = Noted::read(&path)?;
        Some(Other { path, noted })
    };
    let Some(helper) = helper() else {
        return notes_of_disk(disk).into_iter().filter_map(read).collect();
    };
    // If the helper does not answer, it has reported the reason to the process that started it.
    let paths = helper.notes_of_caches(disk).unwrap_or_default();
    let read_other = |path: PathBuf| {
        let file = opener().open(&path, Access::Read, PathSource::Header).ok()?;
        let mut noted = Noted::parse(&small_file::read_open_text(file, STATE_BYTES_MAX).ok()?)?;
        let mark = opener().open(&used_mark(&path), Access::Inspect, PathSource::Header);
        // A mark that cannot be checked counts as present.
        noted.is_used |= mark.err().is_none_or(|error| error.kind() != io::ErrorKind::NotFound);
        Some(Other { path, noted })
    };
    let own = notes_folder();
    let is_own = |path: &Path| own.as_deref() == path.parent();
    let all = paths.into_iter();
    all.filter_map(|path| if is_own(&path) { read(path) } else { read_other(path) })
        .collect()
}

impl Note {
    /// Removes the state files of all caches on `file`; returns whether there were any.
    pub(super) fn take_back_of(file: &ImageAddress) -> bool {
        let file = absolute(file).into_bytes();
        let of_file: Vec<Other> = all().filter(|other| other.noted.cache == file).collect();
        of_file.iter().filter(|other| other.take_back().is_ok()).count() > 0
    }

    /// Returns the state files of all caches of this disk, except those that are `used`, and those that already
    /// record that the disk is used without their cache.
    pub(super) fn others(identity: &[u8], used: &[&Self]) -> Vec<Other> {
        // The directory does not matter, since the name is the cache's UUID.
        let is_used = |other: &Other| used.iter().any(|note| note.name() == other.path.file_name());
        // The image's format does not matter.
        let all = of_disk(disk_id::disk_of(identity)).into_iter();
        all.filter(|other| !is_used(other) && !other.noted.is_used).collect()
    }
}

impl Other {
    /// Returns the address of the cache.
    pub(super) fn file(&self) -> Option<ImageAddress> {
        file_in(&self.noted.cache)
    }

    /// Returns whether the cache is on a file or device, not behind an NBD server.
    pub(super) fn is_at_a_path(&self) -> bool {
        matches!(self.file(), Some(ImageAddress::Path(_)))
    }

    /// Returns whether the cache is one of those in a record of [`super::replaced`].
    pub(super) fn is_one_of(&self, caches: &[Vec<u8>]) -> bool {
        caches.contains(&self.noted.cache)
    }

    /// Returns whether the cache may be dirty.
    pub(super) fn is_dirty(&self) -> bool {
        self.noted.is_dirty
    }

    /// Returns whether this is the state file of the cache with this superblock.
    pub(super) fn is_of(&self, superblock: &Superblock) -> bool {
        Note::of(superblock).name() == self.path.file_name()
    }

    fn take_back(&self) -> io::Result<()> {
        let path = Some(self.path.clone());
        Note { path }.take_back()
    }

    /// Creates the mark that the disk is used without the cache: clean data in the cache becomes stale, and dirty
    /// data needs the user's decision. The files' times would show the change too, but only if the last recorded
    /// fingerprint is old enough.
    pub(super) fn is_used_without(&self) {
        let is_own = notes_folder().as_deref() == self.path.parent();
        let marked = match helper().filter(|_| !is_own) {
            Some(helper) => helper.mark_used(&self.path),
            None => write_whole(&used_mark(&self.path), ""),
        };
        if let Err(error) = marked {
            tracing::warn!(
                "{}: cannot record that a disk is used without its cache: {error}; drop that cache before it is used again (larder disk cache drop)",
                self.path.display()
            );
        }
    }
}

/// Returns the path of the mark for the state file at `path`; it means that the disk was opened for writing without
/// the cache.
pub(crate) fn used_mark(path: &Path) -> PathBuf {
    path.with_extension("used")
}

/// Parses the address of a cache from its state file.
fn file_in(cache: &[u8]) -> Option<ImageAddress> {
    std::str::from_utf8(cache).ok()?.parse().ok()
}

/// Returns the path of the temporary file that then replaces the old file.
fn new_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Replaces a file by one with this text, durably; a crash leaves either the old or the new file.
///
/// Another user may own the directory or its parent: neither the directory nor the file is reached through a symbolic
/// link.
pub(crate) fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder_of(path), flags, Mode::empty())?;
    let new = new_of(path);
    let (Some(name), Some(new)) = (path.file_name(), new.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // A process that was killed meanwhile may have left it.
    let _ = rustix::fs::unlinkat(&folder, new, AtFlags::empty());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(&folder, new, flags, Mode::from_raw_mode(0o666))?);
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    rustix::fs::renameat(&folder, new, &folder, name)?;
    File::open(folder_of(path))?.sync_all()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    digits.map(byte).collect()
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// Returns the directory of the copies in the host's memory.
pub(crate) fn lately_folder() -> PathBuf {
    let folder = private_folder::runtime().map_or_else(runtime_folder, Path::to_owned);
    folder.join(FOLDER)
}

/// Returns the directory of the caches' state files.
pub(crate) fn notes_folder() -> Option<PathBuf> {
    let folder = private_folder::state().map(Path::to_owned).or_else(state_folder);
    folder.map(|folder| folder.join(FOLDER))
}

const FOLDER: &str = "caches";

/// Directory with the state directories of those of the host's services that are a user of their own.
const OF_VMS: &str = "/var/lib/larder-vm";

/// Returns the directory for state that outlives a reboot: systemd's `$STATE_DIRECTORY`, `/var/lib/larder` for root,
/// `$XDG_STATE_HOME/larder` or `~/.local/state/larder`.
pub fn state_folder() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    // The variable may be a list; its first entry is used.
    let of_systemd = std::env::var("STATE_DIRECTORY").ok();
    let of_systemd = of_systemd
        .as_deref()
        .and_then(|list| list.split(':').next())
        .map(PathBuf::from);
    if let Some(folder) = of_systemd.filter(|folder| folder.is_absolute()) {
        return Some(folder);
    }
    if geteuid().is_root() {
        return Some(PathBuf::from("/var/lib/larder"));
    }
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    state.map(|state| state.join("larder"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(detached: Option<&[(u64, u64)]>) -> Noted {
        let range = |(start, len): &(u64, u64)| ByteRange::new(*start, *len);
        Noted {
            sessions: vec![6, 7],
            disk: b"raw file x".to_vec(),
            cache: b"/ssd/x".to_vec(),
            is_used: detached.is_some_and(<[_]>::is_empty),
            is_dirty: detached.is_some_and(<[_]>::is_empty),
            detached: detached.map(|ranges| ranges.iter().map(range).collect()),
            clock: detached.map(|_| HostClock {
                boot: 0x5f3c,
                ahead_seconds: -12,
            }),
            uses: detached.map_or_else(Vec::new, |_| vec![0x77, u64::MAX]),
            stamps: vec![
                FileStamp {
                    is_written: true,
                    bytes: vec![0, 255],
                    changed_ns: Some(-17),
                },
                FileStamp {
                    is_written: false,
                    bytes: Vec::new(),
                    changed_ns: None,
                },
            ],
        }
    }

    /// A state file parses back as written; cut off anywhere, or with a wrong field, it is rejected.
    #[test]
    fn torn_cache_state_file_is_rejected() {
        for noted in [noted(None), noted(Some(&[])), noted(Some(&[(0, 512), (4096, 8192)]))] {
            let text = noted.text();
            assert_eq!(Noted::parse(&text), Some(noted), "{text}");
            for len in 0..text.len() {
                assert_eq!(Noted::parse(&text[..len]), None, "{text}, cut off at {len}");
            }
        }
        let text = noted(Some(&[(0, 512)])).text();
        for (old, new) in [
            ("superseded 0 512", "superseded 0"),
            ("superseded 0 512", "superseded 18446744073709551615 2"),
            ("detached\n", ""),
            ("00ff", "0-ff"),
            ("00ff -17", "00ff -1x"),
            ("00ff -17", "00ff "),
            ("6 7", "6 x"),
            ("-12", "12x"),
            ("clock 5f3c ", "clock "),
            ("uses 77 ", "uses 77  "),
            ("uses 77", "uses 7x"),
            ("sessions", "session"),
        ] {
            assert!(text.contains(old));
            assert_eq!(Noted::parse(&text.replace(old, new)), None, "{new}");
        }
    }

    #[test]
    fn touching_superseded_ranges_are_merged() {
        let mut it = noted(None);
        for (start, len) in [(8, 4), (0, 2), (20, 4), (2, 2), (6, 1), (5, 8), (30, 0), (3, 40)] {
            it.supersede(ByteRange::new(start, len));
            let ranges = it.detached.as_deref().unwrap_or_default();
            let is_apart = ranges.windows(2).all(|pair| pair[0].end() < pair[1].start);
            assert!(is_apart, "{ranges:?}");
        }
        assert_eq!(it.detached, noted(Some(&[(0, 43)])).detached);
    }
}
