//! Checks for problems with a VM's sockets, caches and memory disks, without creating any of them.

use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use super::config::{self, VmConfig, VmDisk};
use super::file_conflicts::file_conflicts;
use super::{parent_directory, sockets};
use crate::image::{ImageAddress, is_same_image};
use crate::listen::find_same_path;
use crate::memory::check_swap_disk;
use crate::runtime_directory::socket_directory;

/// Returns the problems that would keep the VM's server from starting. `is_served` names the disks that it serves now.
pub fn find_problems(config: &VmConfig, is_served: &dyn Fn(&VmDisk) -> bool) -> Vec<String> {
    let others = other_vms(config);
    let socket_problems =
        sockets(config).flat_map(|socket| socket_problem(socket).or_else(|| socket_conflict(socket, &others)));
    let cache_problems = config.disks.iter().flat_map(|disk| {
        let file = match &disk.spec.disk_cache.file {
            Some(ImageAddress::Path(path)) => path,
            _ => return None,
        };
        let size = disk.spec.disk_cache.size.map_or(0, |size| size.get());
        let problem = cache_problem(file, size)?;
        Some(format!("disk {}: {problem}", disk.name))
    });
    let of_files = file_conflicts(config, is_served);
    let of_disks = socket_problems.chain(cache_problems).chain(of_files);
    of_disks.chain(memory_problems(config)).collect()
}

/// Returns the problems that would keep the VM's memory from being managed.
fn memory_problems(config: &VmConfig) -> Vec<String> {
    let Some(memory) = &config.memory else {
        return Vec::new();
    };
    let disks = [&memory.spec.swap, &memory.spec.slow].into_iter().flatten();
    let of_disk = |disk: &crate::memory::SwapConfig| {
        let user = config.disks.iter().find_map(|of| match &of.spec.disk_cache.file {
            _ if is_same_image(&of.spec.image, &disk.address) => Some((&of.name, "image")),
            Some(cache) if is_same_image(cache, &disk.address) => Some((&of.name, "cache")),
            _ => None,
        });
        match user {
            Some((name, what)) => Some(format!("memory: {} is the {what} of disk {name}", disk.address)),
            None => check_swap_disk(disk).err().map(|error| format!("memory: {error}")),
        }
    };
    disks.filter_map(of_disk).collect()
}

fn socket_problem(path: &Path) -> Option<String> {
    let directory = parent_directory(path);
    let shown = path.display();
    match path.symlink_metadata() {
        Ok(found) if !found.file_type().is_socket() => Some(format!("{shown} exists and is not a socket")),
        Ok(_) => None,
        // The first server creates the default directory.
        Err(_) if directory.is_dir() || directory == socket_directory() => None,
        Err(_) => Some(format!("{shown}: there is no directory {}", directory.display())),
    }
}

/// Returns the configurations of the other VMs.
fn other_vms(config: &VmConfig) -> Vec<VmConfig> {
    let read = config::vm_files().into_iter().filter_map(|path| VmConfig::read(&path).ok());
    read.filter(|other| other.name != config.name).collect()
}

fn socket_conflict(path: &Path, others: &[VmConfig]) -> Option<String> {
    let has_socket =
        |other: &&VmConfig| sockets(other).any(|theirs| find_same_path(&[((), theirs), ((), path)]).is_some());
    let other = others.iter().find(has_socket)?;
    Some(format!("{} is also a socket of {}", path.display(), other.name))
}

fn cache_problem(file: &Path, size: u64) -> Option<String> {
    let shown = file.display();
    let directory = parent_directory(file);
    if file.exists() {
        return None;
    }
    if !directory.is_dir() {
        return Some(format!("the cache {shown} cannot be created: there is no directory {}", directory.display()));
    }
    let fs_stat = rustix::fs::statvfs(&directory).ok()?;
    let free = fs_stat.f_bavail.saturating_mul(fs_stat.f_frsize);
    (free < size)
        .then(|| format!("the cache {shown} needs {size} bytes, and {free} are free in {}", directory.display()))
}
