//! What a VM's process opens, makes and removes once all its disks are open.

use super::config::VmConfig;
use super::{away, find, folder_of, sockets};
use crate::confine::Needs;
use crate::image::{Servers, journal, lately_folder, notes_folder};
use crate::inherited::Inherited;
use crate::runtime_folder;

/// Of the process that serves `config`, whose disks have turned out to use these NBD `servers`.
pub(super) fn of(config: &VmConfig, inherited: &Inherited, servers: &[Servers]) -> Needs {
    let mut needs = Needs::default();
    for server in servers.iter().flat_map(Servers::all) {
        needs.connect_to(&server);
    }
    // Each is removed at the end, with a locked file beside it ([`crate::listen`]); others' stay.
    for socket in sockets(config).filter(|socket| !inherited.has(socket)) {
        needs.write_in(folder_of(socket));
    }
    needs.remove_from(find::folder());
    if let Some(folder) = away::folder() {
        needs.write_durably_in(folder);
    }
    for folder in journal::own_folders() {
        needs.remove_from(folder);
    }
    if config.disks.iter().any(|disk| disk.wish.disk_cache.file.is_some()) {
        notes_of_caches(&mut needs);
    }
    needs
}

/// They are renewed as long as the cache is used.
fn notes_of_caches(needs: &mut Needs) {
    if let Some(folder) = notes_folder() {
        needs.write_durably_in(folder);
    }
    // It is made before it is needed. If it cannot be, there is nothing to be said there.
    let folder = lately_folder();
    let _ = runtime_folder::make(folder_of(&folder).as_path(), 0o755);
    let _ = runtime_folder::make(&folder, 0o700);
    needs.write_in(folder);
}
