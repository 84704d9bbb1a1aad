//! Checks for problems with a VM's sockets, caches and memory disks, without creating any of them.

use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use super::config::{self, VmConfig, VmDisk};
use super::files::clashes;
use super::{folder_of, sockets};
use crate::image::{ImageAddress, is_same};
use crate::listen::same_place;
use crate::memory::look_at_disk;
use crate::runtime_folder::socket_folder;

/// Returns the problems that would keep the VM's server from starting. `is_served` names the disks that it serves now.
pub fn problems(config: &VmConfig, is_served: &dyn Fn(&VmDisk) -> bool) -> Vec<String> {
    let others = others(config);
    let of_sockets = sockets(config).flat_map(|socket| of_socket(socket).or_else(|| of_another(socket, &others)));
    let of_caches = config.disks.iter().flat_map(|disk| {
        let file = match &disk.wish.disk_cache.file {
            Some(ImageAddress::Path(path)) => path,
            _ => return None,
        };
        let size = disk.wish.disk_cache.size.map_or(0, |size| size.get());
        let problem = of_cache(file, size)?;
        Some(format!("disk {}: {problem}", disk.name))
    });
    let of_files = clashes(config, is_served);
    let of_disks = of_sockets.chain(of_caches).chain(of_files);
    of_disks.chain(of_memory(config)).collect()
}

/// Returns the problems that would keep the VM's memory from being managed.
fn of_memory(config: &VmConfig) -> Vec<String> {
    let Some(memory) = &config.memory else {
        return Vec::new();
    };
    let disks = [&memory.wish.swap, &memory.wish.slow].into_iter().flatten();
    let of_disk = |disk: &crate::memory::SwapConfig| {
        let taken = config.disks.iter().find_map(|of| match &of.wish.disk_cache.file {
            _ if is_same(&of.wish.image, &disk.address) => Some((&of.name, "image")),
            Some(cache) if is_same(cache, &disk.address) => Some((&of.name, "cache")),
            _ => None,
        });
        match taken {
            Some((name, what)) => Some(format!("memory: {} is the {what} of disk {name}", disk.address)),
            None => look_at_disk(disk).err().map(|error| format!("memory: {error}")),
        }
    };
    disks.filter_map(of_disk).collect()
}

fn of_socket(path: &Path) -> Option<String> {
    let folder = folder_of(path);
    let told = path.display();
    match path.symlink_metadata() {
        Ok(found) if !found.file_type().is_socket() => Some(format!("{told} exists and is not a socket")),
        Ok(_) => None,
        // The first server creates the default directory.
        Err(_) if folder.is_dir() || folder == socket_folder() => None,
        Err(_) => Some(format!("{told}: there is no directory {}", folder.display())),
    }
}

/// Returns the configurations of the other VMs.
fn others(config: &VmConfig) -> Vec<VmConfig> {
    let read = config::files()
        .into_iter()
        .filter_map(|path| VmConfig::read(&path).ok());
    read.filter(|other| other.name != config.name).collect()
}

fn of_another(path: &Path, others: &[VmConfig]) -> Option<String> {
    let is_theirs = |other: &&VmConfig| sockets(other).any(|theirs| same_place(&[((), theirs), ((), path)]).is_some());
    let other = others.iter().find(is_theirs)?;
    Some(format!("{} is also a socket of {}", path.display(), other.name))
}

fn of_cache(file: &Path, size: u64) -> Option<String> {
    let told = file.display();
    let folder = folder_of(file);
    if file.exists() {
        return None;
    }
    if !folder.is_dir() {
        return Some(format!(
            "the cache {told} cannot be created: there is no directory {}",
            folder.display()
        ));
    }
    let room = rustix::fs::statvfs(&folder).ok()?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    (free < size).then(|| {
        format!(
            "the cache {told} needs {size} bytes, and {free} are free in {}",
            folder.display()
        )
    })
}
