//! `larder disk resize`: makes a disk larger. The new space comes after the old, so the guest's data keeps its
//! offsets.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use larder_block::backend::file::Caching;
use larder_block::{ByteLen, Failure, IoError, Loop, printable};
use larder_vm::image::{ChainPolicy, ImageAddress, ImageOptions};
use serde_json::json;

use crate::cli::{ImageArguments, NewSize, Output, ResizeArguments};
use crate::disk_image::{close, format_exact_size};
use crate::output::print;

/// Unit of a disk's size, in bytes.
const SECTOR: u64 = 512;

pub(crate) fn run(arguments: ResizeArguments) -> anyhow::Result<ExitCode> {
    let on = Loop::new(std::time::Duration::ZERO)?;
    let ImageArguments { image, format, output } = arguments.of;
    let options = ImageOptions {
        format: format.map(Into::into),
        chain: ChainPolicy::Follow { trust_image: arguments.trust_image },
        // The size need only be a multiple of a sector, but direct I/O may need larger blocks.
        caching: Caching::Buffered,
        prefetch: None,
        ..ImageOptions::default()
    };
    let (was, is) = on.block_on(async {
        let disk = larder_vm::image::open(&on, &image, &options).await?.device;
        let was = disk.geometry().size;
        let result = match new_size(&image, was, arguments.size) {
            Ok(size) => disk.grow(size).await.map_err(|error| with_advice(&image, &error)),
            Err(error) => Err(error),
        };
        match (result, close(&disk).await) {
            (Ok(()), closed) => closed?,
            (Err(error), Ok(())) => return Err(error),
            (Err(error), Err(closing)) => bail!("{error}; closing the image failed, too: {closing}"),
        }
        anyhow::Ok((was, disk.geometry().size))
    })?;
    print(&match output {
        Output::Text if was == is => {
            format!("{}: {} already\n", printable(&image.to_string()), format_exact_size(is.get()))
        }
        Output::Text => format!(
            "{}: {}, was {}\n",
            printable(&image.to_string()),
            format_exact_size(is.get()),
            format_exact_size(was.get())
        ),
        Output::Json => {
            let result =
                json!({"filename": image.to_string(), "virtual-size": is.get(), "virtual-size-before": was.get()});
            format!("{result:#}\n")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Adds advice to the error of a growth that failed.
fn with_advice(image: &ImageAddress, error: &IoError) -> anyhow::Error {
    let advice = match (error.failure(), image) {
        (Failure::NoSpace, ImageAddress::Nbd(_)) => {
            "an export has the size that its server gives it; make the image larger there"
        }
        (Failure::NoSpace, ImageAddress::Path(path)) if is_block_device(path) => {
            "it is on a block device, which does not grow by itself; make that larger (`lvextend` and the like) first"
        }
        (Failure::NoSpace, ImageAddress::Path(_)) => {
            "the disk keeps its size; free space on the image's file system, or raise the quota, then try again"
        }
        (Failure::Os(libc::EFBIG), _) => {
            "that is more than its format or its file system supports; a copy of a qcow2 image with larger clusters can be larger (`qemu-img convert -O qcow2 -o cluster_size=64k`)"
        }
        (Failure::Unsupported, _) => {
            "an image of version 2 with snapshots keeps its size; `qemu-img amend -o compat=1.1` makes it version 3"
        }
        _ => return anyhow!(error.to_string()),
    };
    anyhow!("{error}; {advice}")
}

fn is_block_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device())
}

fn new_size(image: &ImageAddress, was: ByteLen, size: NewSize) -> anyhow::Result<ByteLen> {
    let size = match size {
        NewSize::Absolute(size) => size,
        NewSize::Growth(more) => match was.get().checked_add(more.get()) {
            Some(size) => ByteLen::new(size),
            None => bail!("{image}: no disk can be that large"),
        },
    };
    if size < was {
        bail!(
            "{image}: it has {}, and shrinking it would discard the data past {}: no file system survives that unless it was shrunk first; if it was, `qemu-img resize --shrink` does it",
            format_exact_size(was.get()),
            format_exact_size(size.get())
        );
    }
    if !size.get().is_multiple_of(SECTOR) {
        bail!(
            "{image}: {} bytes is not a multiple of {SECTOR}; the next is {}",
            size.get(),
            size.get().next_multiple_of(SECTOR)
        );
    }
    Ok(size)
}
