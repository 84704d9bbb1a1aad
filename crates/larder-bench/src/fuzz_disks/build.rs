//! Creates the image of a case with QEMU's tools.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::fault::{Fault, QEMU_DAMAGE};
use super::random::SeededRandom;
use super::shape::{Backing, BackingFormat, Shape};
use super::steps::{QemuStep, qemu_steps};
use super::tools::{contents, qemu, run_qemu_tool_ok};

/// A file that compresses to half its size.
const PATTERN_FILE: &str = "pattern";
const PATTERN_BYTES: usize = 32 << 10;

/// The files of a case.
pub(super) struct Files {
    pub(super) folder: PathBuf,
    pub(super) image: PathBuf,
    pub(super) data_file: PathBuf,
    /// Backing files, which must not change, with their bytes.
    pub(super) backing: Vec<(PathBuf, Vec<u8>)>,
}

/// An image, and its content as QEMU reads it.
pub(super) struct BuiltImage {
    pub(super) files: Files,
    pub(super) bytes: Vec<u8>,
    pub(super) snapshots: Vec<(String, Vec<u8>)>,
    /// Guest cluster whose L2 entry has a flag that version 2 does not define, and the offset of the entry's last
    /// byte.
    pub(super) flagged: Option<(u64, u64)>,
}

/// Creates the image in a directory.
pub(super) fn build(shape: &Shape, seed: u64, directory: &Path) -> Result<BuiltImage, Fault> {
    let mut random = SeededRandom::new(seed, 2);
    let mut files = Files {
        folder: directory.to_owned(),
        image: directory.join("disk.qcow2"),
        data_file: directory.join("data.raw"),
        backing: Vec::new(),
    };
    let pattern: Vec<u8> = (0..PATTERN_BYTES).map(|_| random.below(16) as u8).collect();
    std::fs::write(directory.join(PATTERN_FILE), pattern)?;
    create(shape, &mut files, &mut random)?;
    if shape.content {
        write(shape, &files.image, &mut random, shape.compression != super::shape::Compression::None)?;
    }
    let mut snapshots = Vec::new();
    for index in 0..shape.snapshots {
        let name = format!("s{index}");
        run_qemu_tool_ok("qemu-img", &["snapshot", "-c", &name, text(&files.image)])?;
        snapshots.push((name.clone(), contents(&files.image, "qcow2", Some(&name), directory)?));
        write(shape, &files.image, &mut random, false)?;
    }
    if shape.bitmap {
        run_qemu_tool_ok("qemu-img", &["bitmap", "--add", text(&files.image), "b0"])?;
        write(shape, &files.image, &mut random, false)?;
    }
    if shape.vm_state {
        let at = random.below(4) * shape.cluster_len();
        let command = format!("write -b -P 170 {at} 4k");
        run_qemu_tool_ok("qemu-io", &["-f", "qcow2", "-c", &command, text(&files.image)])?;
    }
    if shape.dirty {
        let command = format!("write -P 85 0 {}", shape.size.min(3 << shape.cluster_bits));
        // The process kills itself: its output and exit status are meaningless.
        qemu("qemu-io", &["-f", "qcow2", "-c", &command, "-c", "sigraise 9", text(&files.image)])?;
    }
    let bytes = contents(&files.image, "qcow2", None, directory)?;
    if shape.device {
        fill_device(shape, &files)?;
    }
    let flagged = if shape.zero_flag { set_zero_flag(&files.image, &mut random)? } else { None };
    if shape.corrupt {
        set_incompatible(&files.image, 2)?;
    }
    Ok(BuiltImage { files, bytes, snapshots, flagged })
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the path of a temporary directory is UTF-8")
}

fn create(shape: &Shape, files: &mut Files, dice: &mut SeededRandom) -> Result<(), Fault> {
    let options = shape.options(text(&files.data_file));
    let size = shape.size.to_string();
    let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", &options];
    let backing;
    if let Some(spec) = &shape.backing {
        backing = create_backing(spec, files, dice)?;
        let format = if spec.format == BackingFormat::Raw { "raw" } else { "qcow2" };
        arguments.extend(["-b", text(&backing), "-F", format]);
    }
    arguments.extend([text(&files.image), &size]);
    run_qemu_tool_ok("qemu-img", &arguments)?;
    for (path, bytes) in &mut files.backing {
        *bytes = std::fs::read(path)?;
    }
    Ok(())
}

fn create_backing(wanted: &Backing, files: &mut Files, dice: &mut SeededRandom) -> Result<PathBuf, Fault> {
    let raw = files.folder.join("base.raw");
    if wanted.format != BackingFormat::Qcow2 {
        let mut bytes = vec![0; wanted.bytes as usize];
        // Some blocks are zeros.
        for block in bytes.chunks_mut(4096) {
            if !dice.one_in(4) {
                block.fill(1 + dice.below(255) as u8);
            }
        }
        File::create(&raw)?.write_all(&bytes)?;
        files.backing.push((raw.clone(), Vec::new()));
        if wanted.format == BackingFormat::Raw {
            return Ok(raw);
        }
    }
    let overlay = files.folder.join("base.qcow2");
    let size = (wanted.bytes / 512 * 512).to_string();
    let options = format!("cluster_size={}", 1u64 << wanted.cluster_bits);
    let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", &options];
    if wanted.format == BackingFormat::Chain {
        arguments.extend(["-b", text(&raw), "-F", "raw"]);
    }
    arguments.extend([text(&overlay), &size]);
    run_qemu_tool_ok("qemu-img", &arguments)?;
    if wanted.bytes >= 512 {
        let shape = Shape {
            cluster_bits: wanted.cluster_bits,
            compression: super::shape::Compression::Zlib,
            size: wanted.bytes / 512 * 512,
            ..Shape::random(&mut SeededRandom::new(0, 0), super::shape::Wanted::default())
        };
        write(&shape, &overlay, dice, dice.clone().one_in(2))?;
    }
    files.backing.push((overlay.clone(), Vec::new()));
    Ok(overlay)
}

/// Lets QEMU change the image.
fn write(shape: &Shape, image: &Path, dice: &mut SeededRandom, compressed: bool) -> Result<(), Fault> {
    let mut steps = qemu_steps(dice, shape.size, shape);
    if compressed {
        // Compressed writes come first, while nothing is allocated: QEMU compresses only new clusters.
        let clusters = shape.size.div_ceil(shape.cluster_len());
        for _ in 0..1 + dice.below(12) {
            let at = dice.below(clusters) * shape.cluster_len();
            steps.insert(0, QemuStep::Compressed(1 + dice.below(255) as u8, at));
        }
    } else {
        steps.retain(|step| !matches!(step, QemuStep::Compressed(..)));
    }
    apply(shape, image, shape.size, &steps)
}

/// Lets QEMU carry out requests. Requests that QEMU rejects are skipped: it compresses no cluster that is allocated.
pub(super) fn apply(shape: &Shape, image: &Path, size: u64, steps: &[QemuStep]) -> Result<(), Fault> {
    let mut arguments = vec!["-f".to_owned(), "qcow2".to_owned(), "-d".to_owned(), "unmap".to_owned()];
    for step in steps {
        let command = match step {
            QemuStep::Write(byte, range) => format!("write -P {byte} {} {}", range.start, range.end - range.start),
            QemuStep::Compressed(byte, at) => {
                let len = shape.cluster_len().min(size.saturating_sub(*at));
                match byte % 2 {
                    0 => format!("write -c -P {byte} {at} {len}"),
                    _ => format!("write -c -s {} {at} {len}", image.with_file_name(PATTERN_FILE).display()),
                }
            }
            QemuStep::Zeroes(true, range) => format!("write -z -u {} {}", range.start, range.end - range.start),
            QemuStep::Zeroes(false, range) => format!("write -z {} {}", range.start, range.end - range.start),
            QemuStep::Discard(range) => format!("discard {} {}", range.start, range.end - range.start),
        };
        arguments.extend(["-c".to_owned(), command]);
    }
    arguments.push(text(image).to_owned());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (code, output) = qemu("qemu-io", &arguments)?;
    if output.contains("Marking image as corrupt") {
        // QEMU 7.2 may allocate an L2 table over compressed data with 512-byte clusters. It then detects that and
        // marks the image as corrupt.
        return Err(Fault::new(QEMU_DAMAGE, output));
    }
    match code {
        // Exit code 1 may come from a rejected request.
        Some(0 | 1) if !output.contains("can't open") => {}
        _ => return Err(Fault::new("qemu", format!("qemu-io: {output}"))),
    }
    // QEMU 7.2 may also let compressed data share a cluster with other data, undetected. The image was sound before.
    match qemu("qemu-img", &["check", "-f", "qcow2", text(image)])? {
        (Some(2), output) => Err(Fault::new(QEMU_DAMAGE, output)),
        _ => Ok(()),
    }
}

/// Extends the file to the size of a device for this disk, according to `qemu-img measure`.
fn fill_device(shape: &Shape, files: &Files) -> Result<(), Fault> {
    let options = shape.options("");
    let size = shape.size.to_string();
    let output = run_qemu_tool_ok("qemu-img", &["measure", "--size", &size, "-O", "qcow2", "-o", &options])?;
    let measured = output
        .lines()
        .find_map(|line| line.strip_prefix("fully allocated size: ")?.parse::<u64>().ok())
        .ok_or_else(|| Fault::new("qemu", format!("qemu-img measure: {output}")))?;
    let slack = if shape.is_plain() { 0 } else { 3 * measured + (1 << 20) };
    let file = OpenOptions::new().write(true).open(&files.image)?;
    let bytes = (measured + slack).max(file.metadata()?.len()).next_multiple_of(512);
    Ok(file.set_len(bytes)?)
}

/// Sets bits of the header's incompatible features.
fn set_incompatible(image: &Path, bits: u8) -> Result<(), Fault> {
    let file = OpenOptions::new().read(true).write(true).open(image)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, 79)?;
    file.write_all_at(&[byte[0] | bits], 79)?;
    Ok(())
}

/// Sets the zero flag in a random entry of the first L2 table of a version 2 image. Returns the guest cluster, and
/// the offset of the entry's last byte. An image without a table is not changed.
fn set_zero_flag(image: &Path, dice: &mut SeededRandom) -> Result<Option<(u64, u64)>, Fault> {
    let mut bytes = Vec::new();
    File::open(image)?.read_to_end(&mut bytes)?;
    let read_u64 =
        |at: usize| bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_be_bytes);
    let cluster_bits = read_u64(16) & 0xffff_ffff;
    let size = read_u64(24);
    let l2 = read_u64(read_u64(40) as usize) & 0x00ff_ffff_ffff_fe00;
    if l2 == 0 {
        return Ok(None);
    }
    let in_table = (size.div_ceil(1 << cluster_bits)).min(1 << (cluster_bits - 3));
    let index = dice.below(in_table);
    let at = l2 + index * 8 + 7;
    let Some(byte) = bytes.get(at as usize) else {
        return Ok(None);
    };
    if read_u64(at as usize - 7) >> 62 & 1 != 0 {
        return Ok(None);
    }
    let file = OpenOptions::new().write(true).open(image)?;
    file.write_all_at(&[byte | 1], at)?;
    Ok(Some((index, at)))
}

/// Clears that zero flag again.
pub(super) fn clear_zero_flag(image: &Path, at: u64) -> Result<(), Fault> {
    let file = OpenOptions::new().read(true).write(true).open(image)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    file.write_all_at(&[byte[0] & !1], at)?;
    Ok(())
}
