//! Tests of an image's mark after its server was killed: a process writes through [`FileDevice`] and gets SIGKILL.
//!
//! `LARDER_MARK_ROUNDS` sets the number of kills for each case.

use std::fs::{File, FileTimes};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::{Caching, FileDevice, FileOptions, Verdict};
use larder_block::boot::boot_id;
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::{AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, Loop, WriteBuf, WriteFlags, ZeroFlags};

const SIZE: u64 = 16 << 20;
const BLOCK: u64 = 4096;

/// The number of the tests' use of an image.
const USE: u64 = 77;

/// The time that a foreign program waits after the kill.
const FOREIGN_AFTER: Duration = Duration::from_millis(100);

fn rounds(default: u32) -> u32 {
    let set = std::env::var("LARDER_MARK_ROUNDS").ok();
    set.and_then(|set| set.parse().ok()).unwrap_or(default)
}

/// An image, a directory for its mark, and its caching mode.
struct Bed {
    image: PathBuf,
    caching: Caching,
    marks: tempfile::TempDir,
    _file: Option<tempfile::NamedTempFile>,
}

impl Bed {
    fn of_file(directory: &str, caching: Caching) -> Self {
        let file = tempfile::NamedTempFile::new_in(directory).expect("an image");
        file.as_file().set_len(SIZE).expect("its size");
        Self {
            image: file.path().to_owned(),
            caching,
            marks: tempfile::tempdir_in("/dev/shm").expect("a directory for marks"),
            _file: Some(file),
        }
    }

    /// Returns test images on a disk file system, with and without the page cache, and on tmpfs.
    fn all() -> Vec<Self> {
        let disk = env!("CARGO_TARGET_TMPDIR");
        vec![
            Self::of_file(disk, Caching::Direct),
            Self::of_file(disk, Caching::Buffered),
            Self::of_file("/dev/shm", Caching::Auto),
        ]
    }

    fn options(&self) -> FileOptions {
        FileOptions {
            caching: self.caching,
            write_record_directory: Some(self.marks.path().to_owned()),
            ..FileOptions::default()
        }
    }

    fn start(&self, work: &str) -> Writer {
        let mut command = Command::new(std::env::current_exe().expect("this test's program"));
        command.args(["writer_for_other_tests", "--exact", "--ignored", "--nocapture"]);
        command.env("LARDER_MARK_IMAGE", &self.image);
        command.env("LARDER_MARK_DIRECTORY", self.marks.path());
        command.env("LARDER_MARK_CACHING", format!("{:?}", self.caching));
        command.env("LARDER_MARK_WORK", work);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("is piped")).lines();
        let is_ready = lines.any(|line| line.is_ok_and(|line| line.ends_with("ready")));
        assert!(is_ready, "the writer has ended before it was ready");
        Writer(child)
    }

    /// Opens the image like the next server, and returns the verdict.
    fn verdict(&self) -> Option<Verdict> {
        let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
        on.block_on(async {
            let device = FileDevice::open(&on, &self.image, self.options()).await.expect("opens");
            let verdict = device.verdict(boot_id().ok(), &[USE]);
            device.acknowledge_verdict(USE);
            device.close().await.expect("closes");
            verdict
        })
    }

    fn write_as_other(&self) {
        let file = File::options().write(true).open(&self.image).expect("opens");
        file.write_all_at(&[0xee; 512], 8192).expect("writes");
        file.sync_all().expect("flushes");
    }
}

struct Writer(Child);

impl Writer {
    fn kill(mut self) {
        self.0.kill().expect("a signal");
        self.0.wait().expect("ends");
    }
}

/// Returns a pause of another length in each round, up to 60 ms after the writer is ready, before the kill.
fn pause(round: u32) -> Duration {
    Duration::from_micros(u64::from(round.wrapping_mul(7919) % 60_000))
}

#[test]
#[ignore = "started by other tests"]
fn writer_for_other_tests() {
    let (Some(image), Some(directory)) =
        (std::env::var_os("LARDER_MARK_IMAGE"), std::env::var_os("LARDER_MARK_DIRECTORY"))
    else {
        return;
    };
    let caching = match std::env::var("LARDER_MARK_CACHING").as_deref() {
        Ok("Direct") => Caching::Direct,
        Ok("Buffered") => Caching::Buffered,
        _ => Caching::Auto,
    };
    let options = FileOptions { caching, write_record_directory: Some(directory.into()), ..FileOptions::default() };
    let is_busy = std::env::var("LARDER_MARK_WORK").is_ok_and(|work| work == "load");
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(async {
        let device = FileDevice::open(&on, Path::new(&image), options).await.expect("opens");
        device.acknowledge_verdict(USE);
        let data = AlignedBuf::zeroed(BLOCK as usize);
        for block in 0..8 {
            let at = ByteOffset::new(block * BLOCK);
            device.write(at, WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
        }
        for task in (0..8).filter(|_| is_busy) {
            on.spawn(work(Rc::clone(&device), task));
        }
        println!("ready");
        on.sleep(Duration::from_secs(3600)).await;
    });
}

/// Writes, punches holes, zeroes and flushes without end.
async fn work(device: Rc<FileDevice>, task: u64) {
    let data = AlignedBuf::zeroed(4 * BLOCK as usize);
    let blocks = device.geometry().size.get() / BLOCK;
    let mut random = task;
    loop {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = ByteOffset::new((random >> 33) % (blocks - 4) * BLOCK);
        let range = ByteRange::new(at.get(), 2 * BLOCK);
        match (random >> 20) % 64 {
            0 => device.discard(range).await,
            1 => device.write_zeroes(range, ZeroFlags::default()).await,
            2 => device.flush().await,
            _ => device.write(at, WriteBuf::new(&data), WriteFlags::NONE).await,
        }
        .expect("is done");
        larder_block::event_loop::yield_now().await;
    }
}

/// The number of times that each verdict was found.
#[derive(Debug, Default)]
struct Counts {
    proven: u32,
    unproven: u32,
    changed: u32,
}

impl Counts {
    fn add(&mut self, verdict: Option<Verdict>) {
        match verdict.expect("there is a mark of this boot") {
            Verdict::Unchanged => self.proven += 1,
            Verdict::Unproven => self.unproven += 1,
            Verdict::Changed => self.changed += 1,
        }
    }
}

/// Checks that at least 99 of 100 kills of a quiet server, with no foreign write, are proven, and none is judged as
/// changed.
fn check_quiet(bed: &Bed, rounds: u32) {
    let mut counts = Counts::default();
    for round in 0..rounds {
        let writer = bed.start("quiet");
        std::thread::sleep(pause(round));
        writer.kill();
        counts.add(bed.verdict());
    }
    println!("quiet, {} {:?}: {counts:?}", bed.image.display(), bed.caching);
    assert!(counts.changed == 0 && counts.proven * 100 >= rounds * 99, "{counts:?}");
}

/// Checks that a kill under load is never judged as a change by others.
fn check_load(bed: &Bed, rounds: u32) {
    let mut counts = Counts::default();
    for round in 0..rounds {
        let writer = bed.start("load");
        std::thread::sleep(pause(round));
        writer.kill();
        counts.add(bed.verdict());
    }
    println!("load, {} {:?}: {counts:?}", bed.image.display(), bed.caching);
    assert_eq!(counts.changed, 0, "{counts:?}");
}

/// Checks that a write by another program 0.1 s after the kill is never missed.
fn check_foreign(bed: &Bed, rounds: u32) {
    for work in ["quiet", "load"] {
        let mut counts = Counts::default();
        for round in 0..rounds {
            let writer = bed.start(work);
            std::thread::sleep(pause(round));
            writer.kill();
            std::thread::sleep(FOREIGN_AFTER);
            bed.write_as_other();
            counts.add(bed.verdict());
        }
        println!("foreign, {work}, {} {:?}: {counts:?}", bed.image.display(), bed.caching);
        assert_eq!(counts.proven, 0, "{counts:?}");
    }
}

#[test]
fn quiet_kill_is_proven() {
    Bed::all().iter().for_each(|bed| check_quiet(bed, rounds(16)));
}

#[test]
fn kill_under_load_is_never_changed() {
    Bed::all().iter().for_each(|bed| check_load(bed, rounds(16)));
}

#[test]
fn foreign_write_after_kill_never_proven() {
    Bed::all().iter().for_each(|bed| check_foreign(bed, rounds(6)));
}

/// A program that restores the time of modification still changes ctime.
#[test]
fn restored_time_after_kill_never_proven() {
    for bed in Bed::all() {
        let writer = bed.start("quiet");
        std::thread::sleep(FOREIGN_AFTER);
        writer.kill();
        let modified = File::open(&bed.image).and_then(|file| file.metadata()).expect("is there");
        bed.write_as_other();
        let file = File::options().write(true).open(&bed.image).expect("opens");
        let times = FileTimes::new().set_modified(modified.modified().expect("has a time"));
        file.set_times(times).expect("ours");
        assert_eq!(bed.verdict(), Some(Verdict::Unproven));
    }
}

/// A closed image is proven too, after all kinds of changes by the device itself.
#[test]
fn closed_image_proven_until_foreign_write() {
    for bed in Bed::all() {
        assert_eq!(bed.verdict(), Some(Verdict::Unproven), "there is no mark");
        let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
        for _ in 0..20 {
            on.block_on(async {
                let device = FileDevice::open(&on, &bed.image, bed.options()).await.expect("opens");
                assert_eq!(device.verdict(None, &[USE]), Some(Verdict::Unchanged));
                let data = AlignedBuf::zeroed(BLOCK as usize);
                let written = device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE);
                written.await.expect("writes");
                device.discard(ByteRange::new(BLOCK, BLOCK)).await.expect("discards");
                let size = ByteLen::new(device.geometry().size.get() + BLOCK);
                device.grow(size).await.expect("grows");
                device.close().await.expect("closes");
            });
        }
        std::thread::sleep(FOREIGN_AFTER);
        assert_eq!(bed.verdict(), Some(Verdict::Unchanged));
        bed.write_as_other();
        assert_eq!(bed.verdict(), Some(Verdict::Changed));
        assert_eq!(bed.verdict(), Some(Verdict::Unchanged), "the change was acknowledged");
    }
}

/// The mark of another use of the image proves nothing for records of an earlier use.
#[test]
fn mark_of_another_use_proves_nothing() {
    let bed = Bed::of_file("/dev/shm", Caching::Auto);
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    let open = |uses: &[u64], next: u64| {
        on.block_on(async {
            let device = FileDevice::open(&on, &bed.image, bed.options()).await.expect("opens");
            let verdict = device.verdict(boot_id().ok(), uses);
            device.acknowledge_verdict(next);
            device.close().await.expect("closes");
            verdict
        })
    };
    assert_eq!(open(&[], 1), Some(Verdict::Unproven), "there is no mark");
    assert_eq!(open(&[1], 2), Some(Verdict::Unchanged));
    assert_eq!(open(&[1], 3), Some(Verdict::Unproven), "use 2 was in between");
    assert_eq!(open(&[2, 3], 4), Some(Verdict::Unchanged));
    assert_eq!(open(&[0], 5), Some(Verdict::Unproven));
}

/// A finding that was not acted upon is carried on, even if nothing is written.
#[test]
fn verdict_is_carried_until_acknowledged() {
    let bed = Bed::of_file("/dev/shm", Caching::Auto);
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    let open = |is_acknowledged: bool| {
        on.block_on(async {
            let device = FileDevice::open(&on, &bed.image, bed.options()).await.expect("opens");
            let verdict = device.verdict(None, &[USE]);
            if is_acknowledged {
                device.acknowledge_verdict(USE);
            }
            device.close().await.expect("closes");
            verdict
        })
    };
    assert_eq!((open(false), open(true), open(true)), (None, None, Some(Verdict::Unchanged)));
    std::thread::sleep(FOREIGN_AFTER);
    bed.write_as_other();
    assert_eq!((open(false), open(false)), (Some(Verdict::Changed), Some(Verdict::Changed)));
    // A reader gets the same verdict, and leaves it to the next opening.
    let reader = FileOptions { read_only: true, ..bed.options() };
    on.block_on(async {
        let device = FileDevice::open(&on, &bed.image, reader).await.expect("opens");
        assert_eq!(device.verdict(None, &[USE]), Some(Verdict::Changed));
        device.close().await.expect("closes");
    });
    assert_eq!((open(true), open(true)), (Some(Verdict::Changed), Some(Verdict::Unchanged)));
}

/// A change by another program between the server's own writes is found by the server itself.
#[test]
fn foreign_write_during_run_is_changed() {
    for bed in Bed::all() {
        let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
        on.block_on(async {
            let device = FileDevice::open(&on, &bed.image, bed.options()).await.expect("opens");
            device.acknowledge_verdict(USE);
            let data = AlignedBuf::zeroed(BLOCK as usize);
            on.sleep(FOREIGN_AFTER).await;
            bed.write_as_other();
            let written = device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE);
            written.await.expect("writes");
            device.close().await.expect("closes");
        });
        assert_eq!(bed.verdict(), Some(Verdict::Changed));
    }
}

/// A loop device over a file, which is detached when this value is dropped.
struct LoopDevice {
    bed: Bed,
    file: tempfile::NamedTempFile,
}

impl LoopDevice {
    fn new() -> Self {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
        file.as_file().set_len(SIZE).expect("its size");
        let made =
            Command::new("losetup").args(["--find", "--show"]).arg(file.path()).output().expect("losetup starts");
        let device = String::from_utf8(made.stdout).expect("a path");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let bed = Bed {
            image: device.trim().into(),
            caching: Caching::Direct,
            marks: tempfile::tempdir_in("/dev/shm").expect("a directory for marks"),
            _file: None,
        };
        Self { bed, file }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.bed.image).status();
        assert!(detached.is_ok_and(|status| status.success()), "{}", self.bed.image.display());
    }
}

#[test]
#[ignore = "needs root and loop devices"]
fn loop_device_is_proven_by_counters() {
    let device = LoopDevice::new();
    check_quiet(&device.bed, rounds(16));
    check_load(&device.bed, rounds(16));
    check_foreign(&device.bed, rounds(6));
    // A write through the page cache, without a flush.
    assert_eq!(device.bed.verdict(), Some(Verdict::Unchanged));
    let other = File::options().write(true).open(&device.bed.image).expect("opens");
    other.write_all_at(&[1; 512], 0).expect("writes");
    assert_eq!(device.bed.verdict(), Some(Verdict::Changed));
    drop(other);
    // A write to the backing file, bypassing the device.
    assert_eq!(device.bed.verdict(), Some(Verdict::Unchanged));
    std::thread::sleep(FOREIGN_AFTER);
    device.file.as_file().write_all_at(&[2; 512], 0).expect("writes");
    assert_eq!(device.bed.verdict(), Some(Verdict::Changed));
}
