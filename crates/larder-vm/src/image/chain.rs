//! An image's chain: the image, its backing file, the backing file's backing file, and so on, and external data
//! files.
//!
//! [`policy::ChainPolicy`] decides which files are opened: headers name files, and the author of an image chose the
//! names.

pub(super) mod policy;

use std::os::fd::AsFd;
use std::rc::Rc;

use larder_block::backend::file::{FileOpenError, FileRole, LockedFile};
use larder_block::backend::image_lock::LockMode;
use larder_block::filter::raw_format_guard::RawFormatGuard;
use larder_block::opener::{self, opener};
use larder_block::{BlockDevice, BoxFuture, Loop};
use larder_qcow2::{MetadataMemory, OpenOptions, Qcow2, RelatedFiles};

use super::address::check_independent_of_cwd;
use super::cache_state::StateFile;
use super::disk_id::{self, DiskFile};
use super::journal::{self, Journals};
use super::modification_proof::{self, ModificationProof};
use super::protected_files;
use super::{
    Format, ImageAddress, ImageError, ImageOptions, detect_file_format, detect_format, open_export, open_file,
    refuse_dirty, with_guest_block_size,
};
use policy::{Author, ChainPolicy, HeaderReference, NamedChain, NamedImage, PinnedBy};

/// Maximum number of images in a chain.
const CHAIN_IMAGES_MAX: usize = 200;

/// An image opened as the disk that it describes.
pub(super) struct OpenedChain {
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) format: Format,
    /// The files of the chain on this host, outermost first.
    pub(super) files: Vec<DiskFile>,
    /// All parts of the chain, including those on NBD servers.
    pub(super) parts: Vec<ChainPart>,
    /// Proof of whether another program has written to the files.
    pub(super) proof: ModificationProof,
    /// Part of the chain is on a block device or an NBD export, which have no modification times that would show a
    /// foreign write.
    pub(super) lacks_timestamps: bool,
}

/// Opens an image as the disk that it describes. The files of a trial are pushed to `held_files`, also if it fails.
pub(super) async fn open(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    held_files: &mut Vec<LockedFile>,
) -> Result<OpenedChain, ImageError> {
    let mut opener = ChainOpener {
        on,
        options,
        ancestors: Vec::new(),
        files: Vec::new(),
        proof: ModificationProof::default(),
        parts: Vec::new(),
        held_files,
        metadata_memory: MetadataMemory::new(options.metadata_memory),
        passed_nbd_server: false,
    };
    let (device, format) =
        opener.open(image, options.format, options.read_only, (options.role.clone(), PartRole::Image)).await?;
    Ok(OpenedChain {
        device,
        format,
        lacks_timestamps: opener.passed_nbd_server || opener.files.iter().any(DiskFile::lacks_timestamps),
        files: opener.files,
        proof: opener.proof,
        parts: opener.parts,
    })
}

/// A file that was opened for a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainPart {
    /// Address of the file.
    pub image: ImageAddress,
    /// Format of the file.
    pub format: Format,
    /// Role of the file for the image that names it.
    pub role: PartRole,
    /// The file may be written.
    pub writable: bool,
}

/// Role of a file of a chain for the image that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartRole {
    /// The image that was asked for.
    Image,
    /// An external data file.
    DataFile,
    /// A backing file.
    Backing,
}

/// One image of a chain as a disk, and its format.
type Layer = (Rc<dyn BlockDevice>, Format);

struct ChainOpener<'a> {
    on: &'a Loop,
    options: &'a ImageOptions,
    /// The images that led here, outermost first.
    ancestors: Vec<ImageAddress>,
    /// The files on this host; see [`OpenedChain`].
    files: Vec<DiskFile>,
    proof: ModificationProof,
    parts: Vec<ChainPart>,
    held_files: &'a mut Vec<LockedFile>,
    metadata_memory: Rc<MetadataMemory>,
    /// The chain so far has an NBD server. A trial ends at an NBD server, so no other process has claimed the files
    /// after it for us.
    passed_nbd_server: bool,
}

impl ChainOpener<'_> {
    fn open<'a>(
        &'a mut self,
        image: &'a ImageAddress,
        format: Option<Format>,
        read_only: bool,
        (role, part): (FileRole, PartRole),
    ) -> BoxFuture<'a, Result<Layer, ImageError>> {
        Box::pin(async move {
            if let (ImageAddress::Nbd(uri), true) = (image, self.options.trial) {
                return Err(ImageError::NotContacted { uri: uri.to_string() });
            }
            let is_probed = format.is_none();
            let format = match format {
                Some(format) => format,
                None => match &self.options.chain {
                    // If the format were probed, a guest could write the first bytes of another format.
                    ChainPolicy::Pinned { by: PinnedBy::VmFile, .. } => return Err(no_format(image)),
                    _ => probe(image)?,
                },
            };
            if format == Format::Qcow2 && self.options.share && !read_only {
                return Err(ImageError::SharedWriter { image: image.to_string() });
            }
            let (file, author) = self.open_bytes(image, (format, is_probed), read_only, role).await?;
            self.parts.push(ChainPart { image: image.clone(), format, role: part, writable: !read_only });
            let device = match format {
                // The guest must not write bytes that would make the next probe find another format. NBD exports are
                // never probed.
                Format::Raw if is_probed && !read_only && matches!(image, ImageAddress::Path(_)) => {
                    Rc::new(RawFormatGuard::new(file, detect_format))
                }
                Format::Raw => file,
                Format::Qcow2 => {
                    self.ancestors.push(image.clone());
                    self.open_qcow2((image, author), file, read_only).await?
                }
            };
            Ok((device, format))
        })
    }

    async fn open_bytes(
        &mut self,
        image: &ImageAddress,
        (format, is_probed): (Format, bool),
        read_only: bool,
        role: FileRole,
    ) -> Result<(Rc<dyn BlockDevice>, Author), ImageError> {
        let mut options = ImageOptions { read_only: read_only || self.is_inspection(), role, ..self.options.clone() };
        if self.passed_nbd_server {
            options.claim = LockMode::Direct;
        }
        let (device, author) = match image {
            ImageAddress::Path(path) => {
                let mark_directory =
                    (options.cache.is_some() && !options.trial).then(modification_proof::mark_directory);
                let file = open_file(self.on, path, &options, format != Format::Raw, mark_directory).await?;
                let found = file.metadata().map_err(|source| FileOpenError::Os {
                    path: path.clone(),
                    what: "reading its owner",
                    source,
                })?;
                let author = Author::from_file(&found, is_probed);
                // The file is locked now, and nothing has been written.
                self.files.push(DiskFile::new(file.as_fd(), path, !read_only));
                self.proof.add_file(&file);
                if options.trial {
                    self.held_files.push(file.retain_locks().map_err(|source| FileOpenError::Os {
                        path: path.clone(),
                        what: "keeping it open",
                        source,
                    })?);
                }
                (file as Rc<dyn BlockDevice>, author)
            }
            ImageAddress::Nbd(uri) => {
                self.passed_nbd_server = true;
                self.proof.add_export();
                let export = open_export(self.on, uri, &options).await?;
                (export as Rc<dyn BlockDevice>, Author::Server)
            }
        };
        let device = with_guest_block_size(device);
        if !read_only && format == Format::Raw {
            protected_files::refuse_protected(image, &device, is_probed).await?;
        }
        Ok((device, author))
    }

    async fn open_qcow2(
        &mut self,
        (image, author): (&ImageAddress, Author),
        file: Rc<dyn BlockDevice>,
        read_only: bool,
    ) -> Result<Rc<dyn BlockDevice>, ImageError> {
        let header = larder_qcow2::read_header(&file).await.map_err(ImageError::Qcow2)?;
        let data_file = match (header.shape.data_file, &header.data_file) {
            (true, None) => {
                return Err(ImageError::NoDataFile { image: image.to_string() });
            }
            (has_data_file, name) => {
                let name = name.as_deref().filter(|_| has_data_file);
                self.open_data_file((image, author), name, read_only).await?
            }
        };
        let named = header.backing_file.as_deref();
        let backing = self.open_backing((image, author), named, header.backing_format.as_deref()).await?;
        if header.corrupt && !read_only {
            return Err(ImageError::Qcow2(larder_qcow2::OpenError::Header {
                name: image.to_string(),
                source: larder_qcow2::header::HeaderError::Corrupt,
            }));
        }
        if self.is_inspection() {
            // The tables and the journal belong to the server, which may be changing them.
            return Ok(file);
        }
        let mut readable_journal = None;
        let journals = match read_only || self.options.trial {
            true => {
                let is_backing = self.ancestors.len() > 1;
                // A shared image may have a running server, whose journal is in use.
                readable_journal = match self.options.share {
                    true => None,
                    false => journal::find_readable(image, &header, !read_only || is_backing)?,
                };
                Journals::default()
            }
            false => journal::open(image, &header)?,
        };
        let (leftover, leftover_path) = match journals.leftover {
            Some((file, leftover)) => (Some(leftover), Some(file)),
            None => (readable_journal, None),
        };
        let options = OpenOptions {
            read_only: read_only || self.options.trial,
            journal: journals.active,
            orphaned_journal: leftover,
            metadata_memory: Rc::clone(&self.metadata_memory),
            ..OpenOptions::default()
        };
        let others = RelatedFiles { backing, data_file };
        let opened = Qcow2::open(self.on, file, others, options).await;
        let opened = opened.map_err(ImageError::Qcow2)?;
        if let Some(file) = leftover_path {
            // The image has the journal's changes now. A journal that cannot be removed is stale, and is not
            // replayed.
            let _ = opener().remove(&file);
        }
        Ok(opened)
    }

    /// Returns whether the image is only inspected, while its server has it open.
    fn is_inspection(&self) -> bool {
        self.options.claim == LockMode::Unlocked
    }

    /// Returns whether a VM's file decides which files may be opened.
    fn is_pinned_by_vm_file(&self) -> bool {
        matches!(self.options.chain, ChainPolicy::Pinned { by: PinnedBy::VmFile, .. })
    }

    /// Returns the number of images that lead to the one that was pushed last.
    fn depth(&self) -> usize {
        self.ancestors.len().saturating_sub(1)
    }

    async fn open_data_file(
        &mut self,
        (image, author): (&ImageAddress, Author),
        name: Option<&str>,
        read_only: bool,
    ) -> Result<Option<Rc<dyn BlockDevice>>, ImageError> {
        let failed = |name: &str, source| ImageError::DataFile {
            image: image.to_string(),
            name: name.to_owned(),
            source: Box::new(source),
        };
        if let (Some(name), true) = (name, self.is_pinned_by_vm_file()) {
            check_independent_of_cwd(name).map_err(|error| failed(name, error.into()))?;
        }
        let named = name.map(|name| {
            let address = ImageAddress::relative_to(image, name).map_err(|error| failed(name, error.into()))?;
            Ok::<_, ImageError>(HeaderReference { name, address, format: Some(Format::Raw) })
        });
        let allowed = self.options.chain.data_file((image, author), self.depth(), named.transpose()?)?;
        let Some(address) = allowed else { return Ok(None) };
        let role = (FileRole::Referenced, PartRole::DataFile);
        let opened = self.open(&address, Some(Format::Raw), read_only, role).await;
        let opened = opened.map_err(|source| failed(&address.to_string(), source));
        opened.map(|(device, _)| Some(device))
    }

    async fn open_backing(
        &mut self,
        (image, author): (&ImageAddress, Author),
        name: Option<&str>,
        format: Option<&str>,
    ) -> Result<Option<Rc<dyn BlockDevice>>, ImageError> {
        let is_pinned_by_vm_file = self.is_pinned_by_vm_file();
        let named = name.map(|name| named_backing(image, name, format, is_pinned_by_vm_file));
        let named = named.transpose()?;
        let name = name.unwrap_or_default();
        let allowed = self.options.chain.backing((image, author), self.depth(), named)?;
        let Some((address, format)) = allowed else {
            return Ok(None);
        };
        if self.ancestors.iter().any(|opened| is_same_image(opened, &address)) {
            return Err(cycle_error(image, name));
        }
        if self.ancestors.len() >= CHAIN_IMAGES_MAX {
            return Err(ImageError::BackingUnsupported {
                image: image.to_string(),
                name: name.to_owned(),
                why: format!("would be the {CHAIN_IMAGES_MAX}th of a chain"),
            });
        }
        let role = (FileRole::Referenced, PartRole::Backing);
        let opened = self.open(&address, format, true, role).await;
        let (device, format) = opened.map_err(|source| match source {
            // The innermost failure names the image and the cause.
            source @ (ImageError::Backing { .. }
            | ImageError::BackingCycle { .. }
            | ImageError::BackingUnsupported { .. }
            | ImageError::Chain(_)) => source,
            source => ImageError::Backing { image: image.to_string(), name: name.to_owned(), source: Box::new(source) },
        })?;
        // The newest data of a backing file with a dirty cache is in that cache, where this chain would not read it. A
        // trial contacts no NBD server.
        let mut other_caches = StateFile::other_caches(&disk_id::identity(&address, format), &[]);
        other_caches.retain(|cache| !self.options.trial || cache.is_local());
        refuse_dirty(self.on, &address, &other_caches).await?;
        Ok(Some(device))
    }
}

/// Returns the backing file that a header names, if Larder can open files with such a name.
/// For a VM's file, the name must mean the same file in every working directory.
fn named_backing<'a>(
    image: &ImageAddress,
    name: &'a str,
    format: Option<&str>,
    is_pinned_by_vm_file: bool,
) -> Result<HeaderReference<'a>, ImageError> {
    let unknown = |why: String| ImageError::BackingUnsupported { image: image.to_string(), name: name.to_owned(), why };
    let format = match format.map(|name| (name, Format::from_driver(name))) {
        None => None,
        Some((_, Some(format))) => Some(format),
        Some((other, None)) => {
            return Err(unknown(format!("has the format '{other}', which Larder does not support")));
        }
    };
    let cannot = |error| unknown(format!("cannot be opened: {error}"));
    if is_pinned_by_vm_file {
        check_independent_of_cwd(name).map_err(cannot)?;
    }
    let address = ImageAddress::relative_to(image, name).map_err(cannot)?;
    Ok(HeaderReference { name, address, format })
}

fn cycle_error(image: &ImageAddress, name: &str) -> ImageError {
    ImageError::BackingCycle {
        image: image.to_string(),
        name: name.to_owned(),
        why: "leads back to an image of the same chain".to_owned(),
    }
}

fn no_format(image: &ImageAddress) -> ImageError {
    // A missing file cannot be probed.
    let found = match image {
        ImageAddress::Path(path) if opener::metadata(path).is_err() => None,
        image => probe(image).ok(),
    };
    ImageError::NoFormat {
        image: image.to_string(),
        found: match found {
            Some(found) => format!("\"{}\" (according to the image's present first bytes)", found.name()),
            None => "\"raw\" or \"qcow2\"".to_owned(),
        },
    }
}

/// Returns the files that the headers of an image and of its backing files name, for a VM's file. Only headers of files
/// on this host are read: no NBD server is contacted, and the format of a backing file is not probed if the header does
/// not give one.
///
/// # Errors
/// One of the files, or its header, cannot be read.
pub async fn named_chain(on: &Loop, image: &ImageAddress, format: Format) -> Result<NamedChain, ImageError> {
    let mut chain = NamedChain::default();
    let (mut overlay, mut format, mut role) = (image.clone(), Some(format), FileRole::Image);
    let mut opened = vec![image.clone()];
    while let (ImageAddress::Path(path), Some(Format::Qcow2)) = (&overlay, format) {
        let options = ImageOptions {
            read_only: true,
            share: true,
            role,
            // The user is shown the names, and decides about them.
            chain: ChainPolicy::Follow { trust_image: true },
            ..ImageOptions::default()
        };
        let file: Rc<dyn BlockDevice> = open_file(on, path, &options, true, None).await?;
        let header = larder_qcow2::read_header(&with_guest_block_size(file)).await;
        let header = header.map_err(ImageError::Qcow2)?;
        if let Some(name) = header.data_file.as_deref().filter(|_| header.shape.data_file) {
            check_independent_of_cwd(name)?;
            let data_file = Some(ImageAddress::relative_to(&overlay, name)?.absolute());
            match chain.backing.last_mut() {
                Some(backing) => backing.data_file = data_file,
                None => chain.data_file = data_file,
            }
        }
        let Some(name) = header.backing_file.as_deref() else {
            break;
        };
        let named = named_backing(&overlay, name, header.backing_format.as_deref(), true)?;
        if chain.backing.len() >= CHAIN_IMAGES_MAX {
            return Err(ImageError::BackingUnsupported {
                image: overlay.to_string(),
                name: name.to_owned(),
                why: format!("would be the {CHAIN_IMAGES_MAX}th of a chain"),
            });
        }
        if opened.iter().any(|opened| is_same_image(opened, &named.address)) {
            return Err(cycle_error(&overlay, name));
        }
        (overlay, format, role) = (named.address.absolute(), named.format, FileRole::Referenced);
        opened.push(overlay.clone());
        chain.backing.push(NamedImage { image: overlay.clone(), format, data_file: None });
    }
    Ok(chain)
}

/// Probes the format of an image from the first bytes of its file or block device. NBD exports are raw.
///
/// # Errors
/// Larder does not support the format.
pub fn probe(image: &ImageAddress) -> Result<Format, ImageError> {
    let found = match image {
        ImageAddress::Path(path) => detect_file_format(path),
        ImageAddress::Nbd(_) => None,
    };
    match found {
        None => Ok(Format::Raw),
        Some("qcow2") => Ok(Format::Qcow2),
        Some(format) => Err(ImageError::OtherFormat { image: image.to_string(), format }),
    }
}

/// Returns whether both addresses lead to the same file.
pub fn is_same_image(one: &ImageAddress, other: &ImageAddress) -> bool {
    match (one, other) {
        (one, other) if one == other => true,
        (ImageAddress::Path(one), ImageAddress::Path(other)) => {
            match (opener().canonicalize(one), opener().canonicalize(other)) {
                (Ok(one), Ok(other)) => one == other,
                _ => false,
            }
        }
        _ => false,
    }
}
