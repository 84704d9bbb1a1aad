//! What is noted of a cache apart from the cache itself, while a server uses it: the note.
//!
//! A cache that was not closed is believed only if its note says so: that it is of this session, and that the device has
//! not failed, which then could not be told itself. Where it did fail, the note says besides which parts of what only the
//! cache has are superseded by what the disk has.
//!
//! It also names the uses of the disk whose marks prove for this cache that nobody else has written to the disk since the
//! server was killed ([`super::proof`]). A cache for which that is proven is believed; otherwise each of its clean lines is
//! compared with the disk before it is used.
//!
//! What is not proven is not believed at all if the times of the disk's files speak against it: it has their stamps, and new
//! ones soon after the server has changed them ([`Made::keep`]). On a busy file system soon may be too late; so the same is
//! written without waiting to the user's folder in the host's memory, which outlives the server, each time that they are
//! looked at: the time of that file says that the server was alive then, and that what was changed before was changed by it.
//!
//! When the cache is closed, its note is taken back; but if part of the disk is on a device or an export, whose writers
//! leave no time, it stays. Such a cache is believed only if the note is there. A server or command of this user that opens
//! the disk without the cache, to write to it, makes a file beside the note, with its name and the ending `used`: who has the
//! cache may be writing the note at that moment, and would not see a change of it.
//!
//! Where the note is lost, or belongs to another user or host, a cache that was not closed begins anew; one that may have
//! data which the disk has not is refused.
//!
//! Its text, written beside the old one, which it then replaces; a line each:
//!
//! ```text
//! sessions 6 7             of the cache, that it speaks for
//! disk 72617720...         the disk's identity, hexadecimal
//! cache 2f737364...        what the cache is on, as a path or URI, hexadecimal
//! clock 5f3c... 1700000000 when the stamps were noted: the host's boot ID, and the clock's seconds less those since boot
//! uses 5be1... 20c3...     of the disk, whose marks speak for this cache, hexadecimal
//! stamp 0000002a...        for each file of the disk, hexadecimal; `written` of one that the server writes to
//! dirty                    the cache may have what the disk has not
//! used                     its server has given it up: the disk is used without the cache since
//! detached                 the device has failed: only what the cache alone has is to be believed
//! superseded 4096 8192     and not that of these bytes of the disk: where, how many
//! end                      it is whole
//! ```

mod made;

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use larder_block::ByteRange;
use larder_block::opener::{Access, NamedBy, opener};
use larder_block::small_file::{self, STATE_BYTES_MAX};
use larder_cache::{Detached, Superblock, Verdict};
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

/// The note of a cache, whether it is there or not.
#[derive(Clone, Debug)]
pub(super) struct Note {
    /// `None` if there is nowhere to have one.
    path: Option<PathBuf>,
}

impl Note {
    /// That of the cache with this superblock. A command, or a server without a folder of its own, finds the one that is there in
    /// whatever folder.
    pub(super) fn of(superblock: &Superblock) -> Self {
        let name = hex(&superblock.uuid);
        let own = notes_folder().map(|folder| folder.join(&name));
        let is_own = private_folder::state().is_some() || own.as_ref().is_some_and(|path| path.exists());
        let elsewhere = || folders().map(|folder| folder.join(&name)).find(|path| path.exists());
        Self {
            path: if is_own { own } else { elsewhere().or(own) },
        }
    }

    /// Takes over the note that is there in another folder, where a server without a folder of its own has made it, if there is none
    /// yet. `disk` is the disk's identity.
    ///
    /// # Errors
    /// The host's.
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
        // It is in the note by now.
        match opener().remove(&used_mark(&other.path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// What it says of the cache since it was last used, for a disk of these files.
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
            (_, Some(superseded)) => Says::Detached(Detached { superseded }),
        }
    }

    /// Returns the uses of the disk that it names for the cache's last session.
    pub(super) fn uses(&self, superblock: &Superblock) -> Vec<u64> {
        self.read_of(superblock).map_or_else(Vec::new, |noted| noted.uses)
    }

    /// What it says of a cache that was closed.
    pub(super) fn says_of_closed(&self, superblock: &Superblock) -> Says {
        match self.read_of(superblock) {
            None => Says::Nothing,
            // A server that found it so was killed before the cache was empty, if that nothing of it is right is noted
            // already.
            Some(noted) if noted.is_used || noted.detached.is_some() => Says::Changed,
            Some(_) => Says::Believe(Verdict::Proven),
        }
    }

    /// Returns where the cache is if the closed one with this superblock is an older copy of it, and the cache itself may
    /// have data that the disk has not.
    pub(super) fn newer_than(&self, superblock: &Superblock) -> Option<String> {
        let is_newer = |noted: &Noted| noted.sessions.iter().all(|session| superblock.session < *session);
        let newer = self.read().filter(|noted| noted.is_dirty && is_newer(noted))?;
        Some(String::from_utf8_lossy(&newer.cache).into_owned())
    }

    /// What it says of a closed cache, which was copied, is so of the copy, too.
    ///
    /// # Errors
    /// The host's.
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

    /// The cache may have what its disk has not, as far as is noted, and is on a file or device, not behind an NBD server.
    pub(super) fn says_dirty_at_a_path(&self) -> bool {
        let is_at_a_path = |noted: &Noted| matches!(file_in(&noted.cache), Some(ImageAddress::Path(_)));
        self.read().is_some_and(|noted| noted.is_dirty && is_at_a_path(&noted))
    }

    /// What it says of the cache's last session.
    fn read_of(&self, superblock: &Superblock) -> Option<Noted> {
        self.read().filter(|noted| noted.sessions.contains(&superblock.session))
    }

    fn read(&self) -> Option<Noted> {
        Noted::read(self.path.as_ref()?)
    }

    /// The cache's number.
    fn name(&self) -> Option<&OsStr> {
        self.path.as_ref().and_then(|path| path.file_name())
    }

    /// Makes it, durably, for the session that is about to begin as for the last one, of which it says what was
    /// `detached`. The last of `uses` is about to begin, too.
    ///
    /// # Errors
    /// The host's; if there is an old one, that speaks for the last session alone.
    pub(super) fn make(
        &self,
        superblock: &Superblock,
        cache: &ImageAddress,
        is_dirty: bool,
        detached: Option<&Detached>,
        files: &[DiskFile],
        uses: Vec<u64>,
    ) -> io::Result<Made> {
        let nowhere = || io::Error::other("neither $XDG_STATE_HOME nor $HOME says where");
        let path = self.path.as_ref().ok_or_else(nowhere)?;
        DirBuilder::new().recursive(true).mode(0o700).create(folder_of(path))?;
        let noted = Noted {
            sessions: vec![superblock.session, superblock.session.wrapping_add(1)],
            disk: superblock.disk.identity.clone(),
            cache: absolute(cache).into_bytes(),
            is_used: false,
            is_dirty,
            detached: detached.map(|detached| detached.superseded.clone()),
            clock: HostClock::now(),
            uses,
            stamps: disk_id::stamps_of_all(files),
        };
        noted.write(path)?;
        // Which the note says itself now, if it was there.
        match fs::remove_file(used_mark(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Made::new(self.clone(), Some(noted), files))
    }

    /// One that could not be made.
    pub(super) fn unmade(&self) -> Made {
        Made::new(self.clone(), None, &[])
    }

    /// Takes it back, durably.
    ///
    /// # Errors
    /// The host's; it may still be there.
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
        // Of one who was killed while he wrote it.
        let _ = fs::remove_file(new_of(path));
        File::open(folder_of(path))
            .and_then(|folder| folder.sync_all())
            .or_else(gone)
    }

    /// Where it says what it said lately, for as long as the host runs.
    fn lately(&self) -> Option<PathBuf> {
        let name = self.path.as_ref()?.file_name()?;
        Some(lately_folder().join(name))
    }

    /// What it said lately, and when its server was alive.
    ///
    /// # Errors
    /// It cannot be read, or others may have written it.
    fn read_lately(&self) -> io::Result<(Noted, SystemTime)> {
        let path = self.lately().ok_or(io::ErrorKind::NotFound)?;
        for folder in path.ancestors().skip(1).take(2) {
            runtime_folder::is_ours_alone(folder)?;
        }
        let alive = fs::metadata(&path)?.modified()?;
        let lately = Noted::parse(&small_file::read_text(&path, STATE_BYTES_MAX)?);
        Ok((lately.ok_or(io::ErrorKind::InvalidData)?, alive))
    }

    /// A file beside it, with this ending, that tells something else of the cache.
    pub(super) fn beside(&self, ending: &str) -> Option<PathBuf> {
        self.path.as_ref().map(|path| path.with_extension(ending))
    }

    /// Where it is looked for, for messages.
    pub(super) fn place(&self) -> String {
        match &self.path {
            Some(path) => path.display().to_string(),
            None => "nowhere, for want of $XDG_STATE_HOME and $HOME".to_owned(),
        }
    }
}

/// A cache is used: held as long as it is. For one that cannot be locked itself, an export.
pub(super) struct Lock {
    path: PathBuf,
    _file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before it is given back: nobody can have another one of this name.
        let _ = fs::remove_file(&self.path);
    }
}

impl Note {
    /// Locks the cache, if there is a place for that.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if somebody uses it, or the host's.
    pub(super) fn lock(&self) -> io::Result<Option<Lock>> {
        let Some(path) = self.beside("lock") else {
            return Ok(None);
        };
        DirBuilder::new().recursive(true).mode(0o700).create(folder_of(&path))?;
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false);
            // A FIFO without a reader is not waited for.
            let file = options.custom_flags(libc::O_NONBLOCK).open(&path)?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            // Whoever had it may have removed it in between.
            let is_it =
                fs::metadata(&path).is_ok_and(|found| file.metadata().is_ok_and(|ours| ours.ino() == found.ino()));
            if is_it {
                return Ok(Some(Lock { path, _file: file }));
            }
        }
    }
}

/// What a note says of a cache that was not closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Says {
    /// It worked to its end; and whether nobody else has written to the disk since, which is never [`Verdict::Changed`].
    Believe(Verdict),
    /// Its device failed, and nobody else has written to the disk since, as far as is known.
    Detached(Detached),
    /// Somebody has.
    Changed,
    /// There is no note, or it is of another time.
    Nothing,
}

/// What stands in a note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Noted {
    /// Of the cache, that it speaks for.
    sessions: Vec<u32>,
    /// The identity of the disk.
    disk: Vec<u8>,
    /// What the cache is on, as a text that says it anywhere on this host.
    cache: Vec<u8>,
    /// The disk has been opened without the cache since, to be written.
    is_used: bool,
    /// The cache may have what the disk has not.
    is_dirty: bool,
    /// The device has failed; what is superseded, each range apart from the others, in order.
    detached: Option<Vec<ByteRange>>,
    /// When the stamps were noted.
    clock: Option<HostClock>,
    /// Of the disk, whose marks speak for the cache.
    uses: Vec<u64>,
    /// Of the disk's files.
    stamps: Vec<FileStamp>,
}

impl Noted {
    /// That at `path`, with what others have marked beside it.
    fn read(path: &Path) -> Option<Self> {
        let mut noted = Self::parse(&small_file::read_text(path, STATE_BYTES_MAX).ok()?)?;
        // What cannot be looked at counts.
        noted.is_used |= used_mark(path).try_exists().unwrap_or(true);
        Some(noted)
    }

    /// `None` if it is not whole, or nothing that this program writes.
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
                "stamp" | "written" => noted.stamps.push(FileStamp {
                    is_written: word == "written",
                    bytes: from_hex(values)?,
                }),
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
            text.push_str(&format!("{word} {}\n", hex(&stamp.bytes)));
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

    /// Takes the stamps as they are now.
    fn set_stamps(&mut self, stamps: Vec<FileStamp>) {
        self.clock = HostClock::now();
        self.stamps = stamps;
    }

    /// Returns whether perhaps only the disk's server has written to its files since; `alive` is its last sign of life, if known.
    fn may_be_only_ours(&self, files: &[DiskFile], alive: Option<SystemTime>) -> bool {
        let step = self.clock.map_or(0, HostClock::step);
        disk_id::may_be_only_ours_since(files, &self.stamps, alive, step)
    }

    /// What was before the last session is over: a copy of the cache from then is not believed.
    fn drop_old_sessions(&mut self) {
        let last = self.sessions.len().saturating_sub(1);
        self.sessions.drain(..last);
        let last = self.uses.len().saturating_sub(1);
        self.uses.drain(..last);
    }

    /// A range is superseded; what touches it becomes one with it.
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

/// A note of a cache that a disk is about to be used without.
pub(super) struct Other {
    path: PathBuf,
    noted: Noted,
}

/// The folders of notes that this process can reach by itself.
fn folders() -> impl Iterator<Item = PathBuf> {
    let mut above: Vec<PathBuf> = state_folder().into_iter().collect();
    if geteuid().is_root() {
        let services = fs::read_dir(OF_VMS).into_iter().flatten().flatten();
        above.extend(services.map(|service| service.path()));
    }
    let private: Vec<PathBuf> = above.iter().flat_map(|folder| private_folder::all_in(folder)).collect();
    above.into_iter().chain(private).map(|folder| folder.join(FOLDER))
}

/// All notes that this process can read by itself.
fn all() -> impl Iterator<Item = Other> {
    let notes = folders().filter_map(|folder| fs::read_dir(folder).ok());
    let paths = notes.flatten().flatten().map(|note| note.path());
    let paths = paths.filter(|path| path.extension().is_none());
    paths.filter_map(|path| {
        let noted = Noted::read(&path)?;
        Some(Other { path, noted })
    })
}

/// Returns the paths of all notes of caches of a disk, as [`disk_id::disk_of`] has it.
pub(crate) fn notes_of_disk(disk: &[u8]) -> Vec<PathBuf> {
    let of_disk = all().filter(|other| disk_id::disk_of(&other.noted.disk) == disk);
    of_disk.map(|other| other.path).collect()
}

/// Returns the paths of all notes of caches of the disk in an image.
pub(crate) fn notes_of_image(image: &ImageAddress) -> Vec<PathBuf> {
    let is_its = |other: &Other| disk_id::is_disk(image, disk_id::disk_of(&other.noted.disk));
    all().filter(is_its).map(|other| other.path).collect()
}

/// All notes of caches of a disk.
fn of_disk(disk: &[u8]) -> Vec<Other> {
    let read = |path: PathBuf| {
        let noted = Noted::read(&path)?;
        Some(Other { path, noted })
    };
    let Some(helper) = helper() else {
        return notes_of_disk(disk).into_iter().filter_map(read).collect();
    };
    // Whoever does not tell has told why to whoever started it.
    let paths = helper.notes_of_caches(disk).unwrap_or_default();
    let read_other = |path: PathBuf| {
        let file = opener().open(&path, Access::Read, NamedBy::Header).ok()?;
        let mut noted = Noted::parse(&small_file::text_of(file, STATE_BYTES_MAX).ok()?)?;
        let mark = opener().open(&used_mark(&path), Access::Look, NamedBy::Header);
        // What cannot be looked at counts.
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
    /// Takes back all notes of caches on `file`; whether there were any.
    pub(super) fn take_back_of(file: &ImageAddress) -> bool {
        let file = absolute(file).into_bytes();
        let of_file: Vec<Other> = all().filter(|other| other.noted.cache == file).collect();
        of_file.iter().filter(|other| other.take_back().is_ok()).count() > 0
    }

    /// All notes of caches of this disk, but for those that are `used`, and those of which it is known already that the disk
    /// is used without them.
    pub(super) fn others(identity: &[u8], used: &[&Self]) -> Vec<Other> {
        // In whatever folder: a cache's number is its own.
        let is_used = |other: &Other| used.iter().any(|note| note.name() == other.path.file_name());
        // Whatever the format it is taken for.
        let all = of_disk(disk_id::disk_of(identity)).into_iter();
        all.filter(|other| !is_used(other) && !other.noted.is_used).collect()
    }
}

impl Other {
    /// What the cache is on.
    pub(super) fn file(&self) -> Option<ImageAddress> {
        file_in(&self.noted.cache)
    }

    /// The cache is one of those, as [`super::replaced`] has them.
    pub(super) fn is_one_of(&self, caches: &[Vec<u8>]) -> bool {
        caches.contains(&self.noted.cache)
    }

    /// The cache may have what the disk has not.
    pub(super) fn is_dirty(&self) -> bool {
        self.noted.is_dirty
    }

    /// It is the note of the cache with this superblock.
    pub(super) fn is_of(&self, superblock: &Superblock) -> bool {
        Note::of(superblock).name() == self.path.file_name()
    }

    fn take_back(&self) -> io::Result<()> {
        let path = Some(self.path.clone());
        Note { path }.take_back()
    }

    /// The disk is used without the cache: what it has of that too is not to be believed any more, and what only it has not
    /// without being asked for. Files say so by their times, if the last change was not too short a while ago.
    pub(super) fn is_used_without(&self) {
        let is_own = notes_folder().as_deref() == self.path.parent();
        let marked = match helper().filter(|_| !is_own) {
            Some(helper) => helper.mark_used(&self.path),
            None => write_whole(&used_mark(&self.path), ""),
        };
        if let Err(error) = marked {
            tracing::warn!(
                "{}: it cannot be noted that a disk is used without its cache: {error}; drop that cache before it is used again (larder disk cache drop)",
                self.path.display()
            );
        }
    }
}

/// What says that a disk has been opened without the cache of the note at `path`, to be written.
pub(crate) fn used_mark(path: &Path) -> PathBuf {
    path.with_extension("used")
}

/// What a note says that its cache is on.
fn file_in(cache: &[u8]) -> Option<ImageAddress> {
    std::str::from_utf8(cache).ok()?.parse().ok()
}

/// Where a file is written before it takes the place of the old one.
fn new_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Writes a text in the place of the old file, durably; whatever happens, one of them is there.
///
/// Another user may own what the folder is in, or the folder: neither it nor the file is reached through a symbolic link.
pub(crate) fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder_of(path), flags, Mode::empty())?;
    let new = new_of(path);
    let (Some(name), Some(new)) = (path.file_name(), new.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // Of a process that was killed meanwhile, if it is there.
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

/// Where what they said lately is.
pub(crate) fn lately_folder() -> PathBuf {
    let folder = private_folder::runtime().map_or_else(runtime_folder, Path::to_owned);
    folder.join(FOLDER)
}

/// Where notes of caches are.
pub(crate) fn notes_folder() -> Option<PathBuf> {
    let folder = private_folder::state().map(Path::to_owned).or_else(state_folder);
    folder.map(|folder| folder.join(FOLDER))
}

const FOLDER: &str = "caches";

/// In it each of the host's services that is a user of its own has its state folder.
const OF_VMS: &str = "/var/lib/larder-vm";

/// What outlives the host's restarts: systemd's `$STATE_DIRECTORY`, `/var/lib/larder` for root, `$XDG_STATE_HOME/larder`
/// or `~/.local/state/larder`.
pub fn state_folder() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    // It may be a list, of which the first will do.
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
                },
                FileStamp {
                    is_written: false,
                    bytes: Vec::new(),
                },
            ],
        }
    }

    #[test]
    fn what_is_noted_is_read_again_and_nothing_else() {
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
    fn ranges_that_touch_become_one() {
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
